"""``optkit report``: an artifact, benchmark results and evaluations as one page, and as Markdown for pull requests."""
