"""The version of optkit."""

VERSION = "0.1.0"
