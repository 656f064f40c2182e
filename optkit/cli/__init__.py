"""The ``optkit`` command: a module per subcommand, and the terminal output."""
