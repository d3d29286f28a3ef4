"""Ask a running `llmpq serve` (such as that of `make serve-demo`) with the package `openai`."""

from openai import OpenAI

if __name__ == "__main__":
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any, as the server has none")
    model = client.models.list().data[0].id
    question = "What is the capital of France?"
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=48
    )
    print(question, answer.choices[0].message.content)
    for chunk in client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=48, temperature=0.8, seed=1, stream=True
    ):
        print(chunk.choices[0].text, end="", flush=True)
    print()
