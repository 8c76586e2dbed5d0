// graphile-worker with its local queue, configured as in its own performance test, but for its size.
"use strict";

const { Pool } = require("pg");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { main } = require("./protocol.cjs");

const CONCURRENCY = 24;
const LOCAL_QUEUE = 1000;
const logger = new Logger(() => () => {});

class GraphileWorker {
  constructor(url) {
    this.url = url;
  }

  async prepare() {
    await this.open();
    await this.utils.migrate();
    await this.close();
  }

  async open() {
    this.pool = new Pool({ connectionString: this.url, max: CONCURRENCY + 1 });
    this.pool.on("error", (error) => { throw error; });
    this.pool.on("connect", (client) => client.on("error", (error) => { throw error; }));
    this.utils = await makeWorkerUtils({ pgPool: this.pool, logger });
  }

  async close() {
    await this.runner?.stop();
    await this.utils.release();
    await this.pool.end();
  }

  async enqueueMany(messages) {
    await this.utils.addJobs(messages.map((payload) => ({ identifier: "task", payload })));
  }

  async enqueue(payload) {
    await this.utils.addJob("task", payload);
  }

  async startWorker(onStart, role) {
    // A delay before the next fetch costs latency when there is little to do.
    const localQueue = role === "drain"
      ? { size: LOCAL_QUEUE, refetchDelay: { durationMs: 10 } }
      : { size: LOCAL_QUEUE };
    this.runner = await run({
      pgPool: this.pool,
      logger,
      noHandleSignals: true,
      taskList: { task: async () => onStart() },
      preset: {
        worker: {
          concurrentJobs: CONCURRENCY,
          maxPoolSize: CONCURRENCY + 1,
          localQueue,
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
    });
  }

  async isDrained() {
    const { rows } = await this.pool.query(
      "SELECT NOT EXISTS (SELECT 1 FROM graphile_worker._private_jobs) AS drained",
    );
    return rows[0].drained;
  }
}

main(GraphileWorker);
