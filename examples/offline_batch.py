"""A batch of prompts without a server: the engine runs in this process."""

from penstock import LLM, SamplingParams

llm = LLM("demo", dtype="float32", max_model_len=1024)

prompts = ["import os", "class Thread", "def join(", "The json module"]
params = [SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=seed) for seed in range(len(prompts))]
for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
    print(f"{prompt!r} -> {output.text!r} ({output.outputs[0].finish_reason})")

conversations = [[{"role": "user", "content": f"What is {name}?"}] for name in ("json", "re", "os.path")]
for answer in llm.chat(conversations, SamplingParams(max_tokens=24, temperature=0.0)):
    print(repr(answer.text))
