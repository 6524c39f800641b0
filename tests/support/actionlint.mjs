// Lints workflows. Arguments: where the linter's package is, then the files. Exits with 1 where something is found.
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [linter, ...paths] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(linter).href);

const ACCEPTED = [
  // This build of the linter is older than configuration variables, attestations and the image.
  /^undefined variable "vars"\./,
  /^unknown permission scope "attestations"\./,
  /^label "ubuntu-24.04" is unknown\./,
  // Labels of our runners: resource classes, and those of the tutorial.
  /^label "(remuda|large|\d+xlarge|xlarge)" is unknown\./,
];

const lint = await createLinter();
let found = 0;
for (const path of paths) {
  const input = await readFile(path, "utf8");
  // The linter takes a file for a workflow by where it lies.
  for (const { line, column, message, kind } of lint(input, `.github/workflows/${path}`)) {
    if (ACCEPTED.some((pattern) => pattern.test(message))) continue;
    console.error(`${path}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
process.exit(found ? 1 : 0);
