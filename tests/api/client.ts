// The TypeScript client at work: it lists GPUs, cordons one with and without a body and on a condition, uploads a policy
// and activates it. Run by lint.py with the address, the token and the module of a policy.
import assert from "node:assert/strict";
import { openAsBlob } from "node:fs";
import * as berth from "./berth/index.js";
import { client } from "./berth/client.gen.js";

const [url, token, module] = process.argv.slice(2) as [string, string, string];
client.setConfig({ baseUrl: url, auth: token });

const { items } = (await berth.listGpus({ throwOnError: true })).data;
assert.equal(items.length, 8);
const path = { uuid: items[0]!.uuid };

const tag = (await berth.getDrainOfGpu({ path })).response!.headers.get("etag")!;
const cordoned = await berth.cordonGpu({ path, headers: { "If-Match": tag }, throwOnError: true });
assert.equal(cordoned.data.drain.state, "cordoned");
const late = await berth.cordonGpu({ path, headers: { "If-Match": tag }, body: { reason: "api-lint" } });
assert.equal(late.response!.status, 412);
assert.equal(late.error!.type, "/problems/changed-meanwhile");
const again = await berth.cordonGpu({ path, body: { reason: "api-lint" }, throwOnError: true });
assert.equal(again.data.drain.why, "api-lint");
const open = await berth.uncordonGpu({ path, throwOnError: true });
assert.equal(open.data.drain.state, "active");

const body = await openAsBlob(module);
const policy = (await berth.uploadPolicy({ body, query: { reason: "api-lint" }, throwOnError: true })).data;
const entries = [{ policy: policy.name, digest: policy.digest }];
const stack = (await berth.activateStack({ body: { entries }, throwOnError: true })).data;
assert.equal(stack.source, "api");
console.log(`TypeScript client: ${items.length} GPUs, policy ${policy.name}, stack ${stack.revision}`);
