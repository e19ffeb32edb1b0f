"""Sentences by how near they are to a question, with the `openai` client.

Run `penstock serve MODEL`, best with an embedding model such as Qwen/Qwen3-Embedding-0.6B, then
`python examples/embeddings.py [URL]`.
"""

import sys

from openai import OpenAI

QUESTION = "How do I join two paths?"
SENTENCES = [
    "os.path.join() joins one or more path segments.",
    "A thread is started by its start() method.",
    "Lists are mutable sequences, used to store collections of items.",
    "pathlib offers classes that represent filesystem paths.",
]

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.embeddings.create(model=model, input=[QUESTION, *SENTENCES])
question, *vectors = (row.embedding for row in answer.data)  # each of length 1: their products are cosines
scores = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
    print(f"{score:.3f}  {sentence}")
print(f"{answer.usage.prompt_tokens} tokens, {len(question)} numbers each")
