// A snapshot, then changes as they come. A lost server is waited for; what came meanwhile is caught up with.
// One thing goes on at a time: a snapshot is fetched, a stream is open, or the next try is due.

const SILENT_MS = 12_000;
const AGAIN_MS = 1_000;
const AGAIN_MOST_MS = 8_000;
const PATIENCE_MS = 20_000;
const UNSEEN_MS = 5_000;

export class Stream {
  constructor(model, { changed, state }) {
    this.model = model;
    this.changed = changed;
    this.state = state;
    this.received = 0;
    this.merged = 0;
    // What comes while a snapshot is fetched; null while none is.
    this.waiting = null;
    this.again_ms = AGAIN_MS;
    setInterval(() => this.watch(), 2_000);
    document.addEventListener("visibilitychange", () => this.turn());
  }

  // A browser opens six connections to a server: a page that nobody sees gives its own back after a while.
  turn() {
    clearTimeout(this.leaving);
    if (document.hidden) this.leaving = setTimeout(() => this.pause(), UNSEEN_MS);
    else if (this.paused) {
      this.paused = false;
      this.open();
    }
  }

  pause() {
    if (!this.source || this.waiting) return;
    this.paused = true;
    this.source.close();
    this.source = null;
    this.state("paused");
  }

  async start() {
    if (await this.snapshot()) this.open();
  }

  // Whether there is one now; where there is not, it is tried again.
  async snapshot() {
    if (this.waiting) return false;
    this.waiting = [];
    try {
      const response = await fetch("/api/snapshot", { cache: "no-cache", signal: AbortSignal.timeout(PATIENCE_MS) });
      if (response.status === 401) location.assign("/login");
      if (!response.ok) throw new Error(`snapshot: ${response.status}`);
      const board = await response.json();
      this.model.reset();
      this.model.apply(board);
    } catch {
      this.retry();
      return false;
    }
    const held = this.waiting;
    this.waiting = null;
    for (const change of held) this.take(change);
    this.changed();
    return true;
  }

  // A source does not tell why it was refused: the server's own words are asked for.
  async refused(source) {
    let words = "";
    try {
      const answer = await fetch(source.url, { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (answer.status === 503) words = (await answer.json()).error.message;
      else answer.body?.cancel();
    } catch {
      // No words of ours.
    }
    if (source === this.source) this.retry(words);
  }

  // From the start, after a while that grows: whatever went on before is over.
  retry(why = "") {
    this.lose(why);
    this.source?.close();
    this.source = null;
    this.waiting = null;
    clearTimeout(this.next);
    this.next = setTimeout(() => this.start(), this.again_ms);
    this.again_ms = Math.min(this.again_ms * 2, AGAIN_MOST_MS);
  }

  open() {
    this.source?.close();
    this.heard = performance.now();
    if (document.hidden) this.turn();
    const source = (this.source = new EventSource(`/api/events?since=${encodeURIComponent(this.model.tag)}`));
    const on = (name, act) => source.addEventListener(name, (event) => source === this.source && act(JSON.parse(event.data)));
    on("look", (look) => this.look(look));
    on("reset", () => this.snapshot());
    on("change", (change) => {
      this.look(change.look);
      if (this.waiting) this.waiting.push(change);
      else this.take(change);
    });
    source.onerror = () => {
      if (source !== this.source) return;
      // A refusal ends it for good: then it is begun anew, and a sign-in asked for where that is what is missing.
      if (source.readyState === EventSource.CLOSED) this.refused(source);
      else this.lose();
    };
  }

  look(look) {
    this.heard = performance.now();
    this.again_ms = AGAIN_MS;
    this.model.heard(look);
    this.state("live");
  }

  take(change) {
    const { board, since } = change;
    if (board.version <= this.model.version) return;
    if (since > this.model.version) {
      this.snapshot();
      return;
    }
    this.received += 1;
    this.merged += board.version - this.model.version - 1;
    this.model.apply(board);
    this.changed();
  }

  lose(why = "") {
    this.state("lost", why);
  }

  // A connection can die without a word.
  watch() {
    if (this.source && !this.waiting && performance.now() - this.heard > SILENT_MS) {
      this.lose();
      this.open();
    }
  }
}
