"""Send a few chat prompts to a model in one batch: `python example.py [MODEL]`."""

import sys

from nanovllm import LLM, SamplingParams


def main() -> None:
    prompts = ["What is the capital of Germany?", "Write a short poem about the sea.", "Why is the sky blue?"]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=128))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")


if __name__ == "__main__":
    main()
