"""The HTTP server: OpenAI's protocol in front of the engine process.

The path of a request, a module per step::

    http/auth          host, key, header size                (ASGI middleware)
    http/body          the bytes of the body, bounded
    openai/protocol    strict JSON to a checked request
    http/admission     a bounded number of choices at a time
    openai/prompts     text or messages to token ids within the context
    openai/jobs        a job per choice
    openai/generation  token ids to text: engine, detokenizer, stop strings
    openai/response    text to one JSON body or an SSE stream       (stream)
    metrics            counts and times, under vLLM's names

``app`` connects the modules and ``server`` owns the process: socket, engine, signals. Every mistake of a client is
answered here with a 4xx, so the engine sees only valid requests.
"""
