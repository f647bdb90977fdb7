// Text, stream, tools and a zod schema with one client, named on the command line; prints the results as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, name, modelName, question] = process.argv.slice(2);
const place = z.object({ city: z.enum(["Paris", "Rome"]) });
const weather = z.object({ city: z.enum(["Paris", "Rome"]), degrees: z.literal([10, 20, 30]) });
const MAX_TOKENS = 200; // enough for every forced call and every answer with a schema
const SHORT = 16;

async function openaiChat() {
    const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).chat.completions;
    const asked = { model: modelName, messages: [{ role: "user", content: question }], temperature: 0 };
    const whole = await client.create({ ...asked, max_tokens: SHORT });
    const pieces = [];
    for await (const chunk of await client.create({ ...asked, max_tokens: SHORT, stream: true })) {
        if (chunk.choices[0].delta.content) pieces.push(chunk.choices[0].delta.content);
    }
    const called = [];
    const measure = ({ city }) => (called.push(city), 20);
    const description = "Measure the temperature in a city.";
    const temperature = zodFunction({ name: "temperature", parameters: place, function: measure, description });
    // The runner calls the function and, because the tool is named, does not ask again.
    const tool_choice = { type: "function", function: { name: "temperature" } };
    const runner = client.runTools({ ...asked, max_tokens: MAX_TOKENS, tools: [temperature], tool_choice });
    await runner.done();
    const format = { max_tokens: MAX_TOKENS, response_format: zodResponseFormat(weather, "weather") };
    const parsed = await client.parse({ ...asked, ...format });
    const streamed = await client.stream({ ...asked, ...format }).finalChatCompletion();
    const answers = [parsed, streamed].map((answer) => answer.choices[0].message.parsed);
    return { text: whole.choices[0].message.content, pieces, called, answers };
}

async function openaiResponses() {
    const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).responses;
    const asked = { model: modelName, input: question, temperature: 0 };
    const whole = await client.create({ ...asked, max_output_tokens: SHORT });
    const pieces = [];
    for await (const event of await client.create({ ...asked, max_output_tokens: SHORT, stream: true })) {
        if (event.type === "response.output_text.delta") pieces.push(event.delta);
    }
    const parameters = z.toJSONSchema(place);
    const temperature = { type: "function", name: "temperature", parameters, strict: true };
    const limited = { ...asked, max_output_tokens: MAX_TOKENS };
    const calling = await client.create({ ...limited, tools: [temperature], tool_choice: "required" });
    const called = calling.output.map((item) => place.parse(JSON.parse(item.arguments)).city);
    const format = { text: { format: zodTextFormat(weather, "weather") } };
    const parsed = await client.parse({ ...limited, ...format });
    const streamed = await client.stream({ ...limited, ...format }).finalResponse();
    return { text: whole.output_text, pieces, called, answers: [parsed.output_parsed, streamed.output_parsed] };
}

async function aiSdk(model) {
    const asked = { model, prompt: question, temperature: 0, maxRetries: 0 };
    const { text } = await generateText({ ...asked, maxOutputTokens: SHORT });
    const pieces = [];
    for await (const piece of streamText({ ...asked, maxOutputTokens: SHORT }).textStream) pieces.push(piece);
    const called = [];
    const execute = ({ city }) => (called.push(city), 20);
    const temperature = tool({ description: "Measure the temperature in a city.", inputSchema: place, execute });
    const loop = await generateText({
        ...asked,
        maxOutputTokens: MAX_TOKENS,
        tools: { temperature },
        output: Output.object({ schema: weather }),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
        stopWhen: stepCountIs(3),
    });
    const format = { ...asked, maxOutputTokens: MAX_TOKENS, output: Output.object({ schema: weather }) };
    const streamed = streamText(format);
    await streamed.consumeStream();
    return { text, pieces, called, answers: [loop.output, (await generateText(format)).output, await streamed.output] };
}

const settings = { baseURL, apiKey: "none" };
const clients = {
    "openai-chat": openaiChat,
    "openai-responses": openaiResponses,
    "ai-sdk-compatible": () =>
        aiSdk(createOpenAICompatible({ ...settings, name: "local", supportsStructuredOutputs: true })(modelName)),
    "ai-sdk-openai-chat": () => aiSdk(createOpenAI(settings).chat(modelName)),
    "ai-sdk-openai-responses": () => aiSdk(createOpenAI(settings).responses(modelName)),
    "ai-sdk-anthropic": () => aiSdk(createAnthropic(settings)(modelName)),
};

console.log(JSON.stringify(await clients[name]()));
