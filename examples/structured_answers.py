"""Have every answer be JSON of a schema, here of a pydantic model, and read it.

    python examples/structured_answers.py

The committed demo model knows nothing of pets; what it makes up has the form all the same.
"""

from pathlib import Path

from pydantic import BaseModel, Field

from llmpq import Cluster, Workload

EXAMPLES = Path(__file__).resolve().parent
ROWS = [
    {"prompt": "A pet:", "seed": number, "temperature": 0.7, "max_new_tokens": 100}
    for number in range(4)
]
CHOICE = {"prompt": "Cats or dogs?", "structured_outputs": {"choice": ["cats", "dogs"]}}
"""A row's own form comes before that of the job."""


class Pet(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=30)
    is_tame: bool


if __name__ == "__main__":
    cluster = Cluster.from_yaml(EXAMPLES.parent / "cluster_specs" / "demo_mixed_cpu.yaml")
    plan = cluster.plan(EXAMPLES / "demo_model", Workload(8, 16, 100), theta=1.0)
    for result in plan.run([*ROWS, CHOICE], json_schema=Pet.model_json_schema()):
        if result.finish_reason == "length":
            print("cut, as it was longer than 100 tokens:", result.text)
        elif result.text in ("cats", "dogs"):
            print(result.text)
        else:
            print(Pet.model_validate_json(result.text))
