// pg-boss with batches. The variant is "<batch size> <workers>".
"use strict";

const { PgBoss } = require("pg-boss");
const { main } = require("./protocol.cjs");

const QUEUE = "tasks";

class Boss {
  constructor(url, variant) {
    this.url = url;
    [this.batchSize, this.workers] = variant.split(" ").map(Number);
  }

  async prepare() {
    await this.open();
    await this.boss.createQueue(QUEUE, { notify: true });
    await this.close();
  }

  async open() {
    this.boss = new PgBoss({
      connectionString: this.url,
      max: 10,
      useListenNotify: true,
      schedule: false,
      supervise: false,
    });
    this.boss.on("error", (error) => { throw error; });
    await this.boss.start();
  }

  async close() {
    await this.boss.stop({ graceful: false });
  }

  async enqueueMany(messages) {
    await this.boss.insert(QUEUE, messages.map((data) => ({ data })));
  }

  async enqueue(message) {
    await this.boss.send(QUEUE, message);
  }

  async startWorker(onStart) {
    const options = {
      batchSize: this.batchSize,
      localConcurrency: this.workers,
      burstWhenBatchFull: true,
    };
    await this.boss.work(QUEUE, options, async (jobs) => jobs.forEach(() => onStart()));
  }

  async isDrained() {
    const { rows } = await this.boss.getDb().executeSql(
      "SELECT NOT EXISTS (SELECT 1 FROM pgboss.job WHERE state < 'completed') AS drained",
    );
    return rows[0].drained;
  }
}

main(Boss);
