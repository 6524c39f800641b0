// fauxqs, an SQS server, on loopback only and with a clock that tests can move.
// Arguments: where the package is. It prints its port; each line that it reads is a number of seconds to move ahead.
// It ends with its input.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const { buildApp } = await import(pathToFileURL(process.argv[2]).href);
const realNow = Date.now;
let aheadMs = 0;
Date.now = () => realNow() + aheadMs;

const app = buildApp({ logger: false });
const address = await app.listen({ port: 0, host: "127.0.0.1" });
console.log(new URL(address).port);

const lines = createInterface({ input: process.stdin });
lines.on("line", (line) => {
  aheadMs += Number(line) * 1000;
  console.log("moved");
});
lines.on("close", () => process.exit(0));
