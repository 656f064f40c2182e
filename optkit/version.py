"""The one place that holds optkit's version."""

VERSION = "0.1.0"
