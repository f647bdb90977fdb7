// One call of the real Node client, named on the command line; prints what it got as JSON.
import OpenAI from "openai";

const [baseURL, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "secret", maxRetries: 0, timeout: 20_000 });
const model = "fake";
const messages = [{ role: "user", content: "Hello" }];
const parameters = { type: "object", properties: { a: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", description: "Add.", parameters } }];

const calls = {
    async models() {
        return (await client.models.list()).data.map((card) => card.id);
    },

    async chat() {
        const answer = await client.chat.completions.create({ model, messages, n: 2, logprobs: true, top_logprobs: 2 });
        return { answer, requestId: answer._request_id };
    },

    async stream() {
        const asked = { model, messages, stream: true, stream_options: { include_usage: true } };
        const chunks = [];
        for await (const chunk of await client.chat.completions.create(asked)) chunks.push(chunk);
        return chunks;
    },

    // The client's own helper puts the pieces together again, and is strict about their order.
    async tools() {
        const called = await client.chat.completions.create({ model, messages, tools });
        const runner = client.chat.completions.stream({ model, messages, tools });
        return { called, streamed: await runner.finalChatCompletion() };
    },

    async schema() {
        const response_format = { type: "json_schema", json_schema: { name: "x", strict: true, schema: parameters } };
        return client.chat.completions.parse({ model, messages, response_format });
    },

    async embeddings() {
        const input = ["one", "two three"];
        const packed = await client.embeddings.create({ model, input }); // asks for base64 and unpacks it
        const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
        return [packed, plain].map((answer) => answer.data.map((item) => Array.from(item.embedding)));
    },

    async responses() {
        const events = [];
        for await (const event of await client.responses.create({ model, input: "Hello", stream: true })) {
            events.push(event.type);
        }
        return { events, text: (await client.responses.create({ model, input: "Hello" })).output_text };
    },

    async errors() {
        const refused = [
            () => client.chat.completions.create({ model, messages, temperature: -1 }),
            () => client.chat.completions.create({ model: "other", messages }),
            () => client.withOptions({ apiKey: "wrong" }).models.list(),
        ];
        const told = [];
        for (const call of refused) {
            try {
                await call();
                told.push("no error");
            } catch (error) {
                told.push({ kind: error.constructor.name, status: error.status, param: error.param, code: error.code });
            }
        }
        return told;
    },

    async brokenStream() {
        try {
            for await (const _ of await client.chat.completions.create({ model, messages, stream: true }));
            return "no error";
        } catch (error) {
            return { kind: error.constructor.name, message: error.message };
        }
    },

    async abort() {
        const stream = await client.chat.completions.create({ model, messages, stream: true });
        let pieces = 0;
        for await (const _ of stream) if (++pieces === 2) stream.controller.abort();
        return pieces;
    },
};

console.log(JSON.stringify(await calls[name]()));
