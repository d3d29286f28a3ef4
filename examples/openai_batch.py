"""Have a running `llmpq serve` (such as that of `make serve-demo`) answer a batch of requests."""

import json
import time

from openai import OpenAI

PROMPTS = ("def main(", "import os", "class Stack:", "for line in")

if __name__ == "__main__":
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any, as the server has none")
    model = client.models.list().data[0].id
    lines = [
        {
            "custom_id": f"prompt-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": prompt, "max_tokens": 24},
        }
        for number, prompt in enumerate(PROMPTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("prompts.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        print(client.files.content(file_id).text, end="")
