"""The HTTP server: OpenAI's protocol in front of the engine process.

The path of a request, one module a step::

    guard      who may ask, and how much they may send      (ASGI middleware)
    json_body  bytes to JSON, strictly
    protocol   JSON to a checked request
    prompts    text or messages to token ids that fit the context   (chat_template, tokenizer)
    admission  a bounded number of requests at a time
    generation token ids to text: engine, detokenizer, stop strings
    reply      text to one JSON body or an SSE stream       (stream)
    metrics    what happened, under vLLM's names

``app`` wires them together and ``server`` owns the process: socket, engine, signals. Everything a client
can get wrong is answered here with a 4xx, so that the engine only ever sees requests it can run.
"""
