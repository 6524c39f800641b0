// fauxqs, an SQS server, on loopback with an adjustable clock.
// Argument: path of the package. Prints its port; each line on standard input is a number of seconds by which to
// advance the clock. Exits at the end of its input.
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
