"""The exact response cache (``--response-cache``); imported only by servers with the option."""
