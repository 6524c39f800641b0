// Connection to the server: a snapshot, then a stream of changes. After a lost connection it reconnects and catches up.
// Exactly one of these is active at a time: fetching a snapshot, an open stream, or a timer for the next attempt.

// A stream without any event for this long is considered dead; the server sends one at least every 5 s.
const SILENCE_LIMIT_MS = 12_000;
const RETRY_MS = 1_000;
const MAX_RETRY_MS = 8_000;
const REQUEST_TIMEOUT_MS = 20_000;
const HIDDEN_LIMIT_MS = 5_000;

export class Stream {
  constructor(model, { changed, state }) {
    this.model = model;
    this.changed = changed;
    this.state = state;
    // Changes received while a snapshot is being fetched; null at other times.
    this.pending = null;
    this.retryMs = RETRY_MS;
    setInterval(() => this.checkSilence(), 2_000);
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  // Browsers open at most six connections per server, so a hidden page closes its stream after a while.
  onVisibility() {
    clearTimeout(this.pauseTimer);
    if (document.hidden) this.pauseTimer = setTimeout(() => this.pause(), HIDDEN_LIMIT_MS);
    else if (this.paused) {
      this.paused = false;
      this.open();
    }
  }

  pause() {
    if (!this.source || this.pending) return;
    this.paused = true;
    this.source.close();
    this.source = null;
    this.state("paused");
  }

  async start() {
    if (await this.fetchSnapshot()) this.open();
  }

  // Returns whether it succeeded. Schedules a retry if not.
  async fetchSnapshot() {
    if (this.pending) return false;
    this.pending = [];
    try {
      const response = await fetch("/api/snapshot", { cache: "no-cache", signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS) });
      if (response.status === 401) location.assign("/login");
      if (!response.ok) throw new Error(`snapshot: ${response.status}`);
      const snapshot = await response.json();
      this.model.reset();
      this.model.apply(snapshot);
    } catch {
      this.retry();
      return false;
    }
    const pending = this.pending;
    this.pending = null;
    for (const change of pending) this.apply(change);
    this.changed();
    return true;
  }

  // An EventSource does not expose why it was rejected, so the URL is fetched once to read the error message.
  async readRejection(source) {
    let message = "";
    try {
      const response = await fetch(source.url, { signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS) });
      if (response.status === 503) message = (await response.json()).error.message;
      else response.body?.cancel();
    } catch {
      // Retry without a message.
    }
    if (source === this.source) this.retry(message);
  }

  // Start again with a snapshot, after a delay that grows with each attempt.
  retry(reason = "") {
    this.state("lost", reason);
    this.source?.close();
    this.source = null;
    this.pending = null;
    clearTimeout(this.retryTimer);
    this.retryTimer = setTimeout(() => this.start(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, MAX_RETRY_MS);
  }

  open() {
    this.source?.close();
    this.lastEvent = performance.now();
    if (document.hidden) this.onVisibility();
    const source = (this.source = new EventSource(`/api/events?since=${encodeURIComponent(this.model.tag)}`));
    const on = (name, handle) => source.addEventListener(name, (event) => source === this.source && handle(JSON.parse(event.data)));
    on("update", (poll) => this.onUpdate(poll));
    on("reset", () => this.fetchSnapshot());
    on("change", (change) => {
      this.onUpdate(change.poll);
      if (this.pending) this.pending.push(change);
      else this.apply(change);
    });
    source.onerror = () => {
      if (source !== this.source) return;
      // The browser reconnects by itself, except after a rejection.
      if (source.readyState === EventSource.CLOSED) this.readRejection(source);
      else this.state("lost");
    };
  }

  onUpdate(poll) {
    this.lastEvent = performance.now();
    this.retryMs = RETRY_MS;
    this.model.setPollTimes(poll);
    this.state("live");
  }

  apply({ changes, since }) {
    if (changes.version <= this.model.version) return;
    if (since > this.model.version) {
      this.fetchSnapshot();
      return;
    }
    this.model.apply(changes);
    this.changed();
  }

  // Reopen a connection that died without an error.
  checkSilence() {
    if (this.source && !this.pending && performance.now() - this.lastEvent > SILENCE_LIMIT_MS) {
      this.state("lost");
      this.open();
    }
  }
}
