"""The engine process, and the client that starts, feeds and stops the process."""
