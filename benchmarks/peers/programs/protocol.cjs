// What a program of a peer does when it is asked, and how it answers: see protocol.py.
"use strict";

const readline = require("node:readline");

const BATCH = 1000;
const CALLERS = 100;
const POLL_MS = 1;

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const answer = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
const buildMessage = (number) => ({ to: `user-${number}@example.com`, retry: false });
// The clock that all processes of a machine share.
const monotonic = () => Number(process.hrtime.bigint()) / 1e9;

class Stopwatch {
  start() {
    this.started = performance.now();
    this.cpu = process.cpuUsage();
  }

  answer() {
    const seconds = (performance.now() - this.started) / 1000;
    const { user, system } = process.cpuUsage(this.cpu);
    answer({ seconds, cpu: (user + system) / 1e6 });
  }
}

const roles = {
  async prepare(peer) {
    await peer.prepare();
    answer({});
  },

  async fill(peer, count) {
    const messages = Array.from({ length: count }, (_, number) => buildMessage(number));
    const watch = new Stopwatch();
    await peer.open();
    watch.start();
    for (let start = 0; start < count; start += BATCH) {
      await peer.enqueueMany(messages.slice(start, start + BATCH));
    }
    watch.answer();
    await peer.close();
  },

  async singles(peer, count) {
    const watch = new Stopwatch();
    const callers = Array.from({ length: CALLERS }, (_, caller) => caller);
    const call = async (caller) => {
      for (let number = caller; number < count; number += CALLERS) {
        await peer.enqueue(buildMessage(number));
      }
    };
    await peer.open();
    // Connections are opened on demand: not part of the measurement.
    await Promise.all(callers.map(() => peer.enqueue(buildMessage(-1))));
    watch.start();
    await Promise.all(callers.map(call));
    watch.answer();
    await peer.close();
  },

  async drain(peer, count) {
    const watch = new Stopwatch();
    let started = 0;
    let resolve;
    const haveStarted = new Promise((done) => { resolve = done; });
    await peer.open();
    await peer.startWorker(() => {
      started += 1;
      if (started === 1) watch.start();
      if (started === count) resolve();
    }, "drain");
    await haveStarted;
    while (!(await peer.isDrained())) await sleep(POLL_MS);
    watch.answer();
    await peer.close();
    if (started !== count) throw new Error(`${started} handlers started for ${count} messages`);
  },

  async work(peer) {
    await peer.open();
    await peer.startWorker(() => answer({ at: monotonic() }), "work");
    process.stdin.resume();
    await new Promise((resolve) => process.stdin.on("end", resolve));
    await peer.close();
  },

  async push(peer) {
    await peer.open();
    answer({});
    for await (const _ of readline.createInterface({ input: process.stdin })) {
      const began = monotonic();
      await peer.enqueue(buildMessage(0));
      answer({ at: began });
    }
    await peer.close();
  },
};

// Do what the command line asks for. A peer has prepare, open, close, enqueueMany, enqueue,
// startWorker and isDrained, as PeerProgram in protocol.py.
exports.main = async (Peer) => {
  const [role, url, count, variant] = process.argv.slice(2);
  try {
    await roles[role](new Peer(url, variant), Number(count));
    process.exit(0);
  } catch (error) {
    console.error(error);
    process.exit(1);
  }
};
