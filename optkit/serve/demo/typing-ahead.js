// A client of optkit's chat endpoint that has the prompt computed while it is still being written.
//
//   const ahead = new TypingAhead({url: "http://localhost:8000"});
//   input.oninput = () => ahead.update([{role: "user", content: input.value}]);
//   const {text, firstTokenMs} = await ahead.send([{role: "user", content: input.value}], piece => show(piece));
//
// update() asks for the prompt so far, at most once in `interval` milliseconds and one call at a time; the latest prompt
// wins. Nothing is generated, and a call that fails costs nothing: send() gives the same answer with it or without it.
// `failure` is the reason why the last call failed, or null.
class TypingAhead {
  constructor({url = "", apiKey = "", model = undefined, interval = 1000, session = undefined} = {}) {
    Object.assign(this, {url, apiKey, model, interval});
    this.session = session || "typing-" + Math.random().toString(36).slice(2);
    this.calls = 0;
    this.failure = null;
    this.next = null; // the latest prompt that was not asked for yet
    this.timer = null;
    this.running = null; // the AbortController of the call in progress
  }

  update(messages, fields = {}) {
    this.next = {...fields, messages};
    if (this.timer === null && this.running === null) {
      this.timer = setTimeout(() => this.warm(), this.interval);
    }
  }

  async warm() {
    this.timer = null;
    const body = {...this.next, session: this.session};
    this.next = null;
    this.running = new AbortController();
    const signal = this.running.signal;
    try {
      this.calls += 1;
      const answer = await this.post("/v1/cache/warm", body, signal);
      this.failure = answer.ok ? null : await reason(answer);
      if (answer.ok) await answer.json();
    } catch (error) {
      if (!signal.aborted) this.failure = error.message;
    }
    if (signal.aborted) return;
    this.running = null;
    if (this.next !== null) this.timer = setTimeout(() => this.warm(), this.interval);
  }

  cancel() {
    clearTimeout(this.timer);
    if (this.running !== null) this.running.abort();
    this.next = this.timer = this.running = null;
  }

  async send(messages, onText = () => {}, fields = {}) {
    this.cancel();
    const start = performance.now();
    const body = {...fields, messages, stream: true, stream_options: {include_usage: true}};
    const answer = await this.post("/v1/chat/completions", body);
    if (!answer.ok) throw new Error(await reason(answer));
    const found = {text: "", firstTokenMs: null, cachedTokens: 0, promptTokens: 0};
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices && event.choices[0] && event.choices[0].delta.content;
      if (piece) {
        if (found.firstTokenMs === null) found.firstTokenMs = performance.now() - start;
        found.text += piece;
        onText(piece);
      }
      if (event.usage) {
        found.promptTokens = event.usage.prompt_tokens;
        found.cachedTokens = (event.usage.prompt_tokens_details || {}).cached_tokens || 0;
      }
    }
    return found;
  }

  post(path, body, signal = undefined) {
    const headers = {"Content-Type": "application/json"};
    if (this.apiKey) headers.Authorization = "Bearer " + this.apiKey;
    if (this.model) body.model = this.model;
    return fetch(this.url + path, {method: "POST", headers, body: JSON.stringify(body), signal});
  }
}

// The message of an error.
async function reason(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch (error) {
    return "HTTP " + answer.status; // of a proxy
  }
}

// The JSON of each server-sent event, up to [DONE].
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += decoder.decode(value, {stream: true});
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
