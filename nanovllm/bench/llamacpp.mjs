// llama.cpp for bench/llamacpp.py: reads one workload per line, and answers with the number of tokens of each output.
import {createInterface} from "node:readline";

const [address, path, threads, slots, length] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(address);
const count = Number(threads);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.disabled, maxThreads: count});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({sequences: Number(slots), contextSize: Number(length), threads: count});

async function complete(prompt, length) {
  const sequence = context.getSequence();
  let made = 0;
  for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    if (++made === length) break;
  }
  sequence.dispose();
  return made;
}

console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
  const {prompts, lengths} = JSON.parse(line);
  console.log(JSON.stringify(await Promise.all(prompts.map((prompt, i) => complete(prompt, lengths[i])))));
}
