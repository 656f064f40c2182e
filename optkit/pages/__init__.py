"""Self-contained pages: HTML without scripts and fetched files, and charts as inline SVG.

Nothing here knows of models or measurements. Every text is escaped on the way into a page, except ``Markup``.
"""
