"""The text by which importance is measured where no file tells it, as drivers know it: no torch."""

from __future__ import annotations

from planner.model.shape import ModelShape

SEQUENCE_TOKENS = 64
MOST_SEQUENCES = 8
_TOKEN_PARAMETERS = 1 << 37
"""Most tokens times parameters of layers beyond one sequence: 4 s of a core with 70 GFLOP/s."""

SEED = 0


def sample_sequences(shape: ModelShape) -> int:
    """Sequences of the text that pass through the model: fewer through a large one."""
    affordable = _TOKEN_PARAMETERS // (SEQUENCE_TOKENS * shape.layers * shape.layer_parameters)
    return max(1, min(MOST_SEQUENCES, affordable))


def what_is_seen(shape: ModelShape) -> str:
    """What passes through a model whose importance no file tells, in words."""
    return (
        f"{sample_sequences(shape)} x {SEQUENCE_TOKENS} tokens of English prose, or random ids "
        f"without a tokenizer, seed {SEED}"
    )


PASSAGES = (
    "The river rises in the hills behind the old town and turns north before it reaches the "
    "sea. In late summer children can wade from one bank to the other without getting their "
    "knees wet.",
    "LONDON, 14 March 2019 (Reuters) - Shares of the company fell 3.7% to $41.20 on Thursday "
    "after it said that revenue would be less than analysts had expected.",
    '"You never told me," she said, and put the letter down. He looked out of the window. It '
    'had begun to rain again. "I meant to," he answered at last.',
    "In 1687 Isaac Newton published the Principia, in which he showed that the same force that "
    "makes an apple fall keeps the Moon in its orbit.",
    "Question: What is the capital of Australia?\nAnswer: Canberra. Sydney is the largest "
    "city, but Canberra, founded in 1913, is the seat of government.",
    "Neither party shall be liable for any indirect or consequential damages, except in cases "
    "of gross negligence. Either party may terminate this agreement by giving thirty (30) "
    "days' written notice to the other.",
    "Preheat the oven to 180 °C (350 °F). Mix 250 g flour, 2 teaspoons baking powder and a "
    "pinch of salt. Bake for 35 to 40 minutes, and let the cake cool before you cut it.",
    "Photosynthesis takes place in two steps. First, chlorophyll absorbs light and splits "
    "water into oxygen, protons and electrons; then carbon dioxide is bound and reduced to "
    "sugars.",
    "User: My bicycle squeaks when I pedal uphill. What could it be?\nAssistant: Most often it "
    "is a dry chain. Clean it with a cloth, put a drop of oil on each link, and wipe off what "
    "is left. If that doesn't help, check 1) the pedals and 2) the saddle.",
    "The committee met again in the autumn. Its members had read the report, and most of them "
    "agreed that the bridge should be repaired before winter. The engineer explained why the "
    "foundations had moved, what the work would cost and how long the road would have to be "
    "closed. Nobody asked how it had come to that.",
    "A good teacher does not only know the subject; she knows where learners go wrong. When a "
    "child says that one third is larger than one half because three is larger than two, it is "
    "not enough to say that this is false. The child has to see a cake that is cut into three "
    "parts, and another that is cut into two.",
    "The function takes a list of numbers and returns their mean. An empty list raises a "
    "ValueError, as there is nothing to divide by; values that are not finite are left out, "
    "and a warning says how many there were.",
    "Winters on the coast are mild and wet. Snow falls on few days and seldom lies longer than "
    "a night, but storms from the west can stop the ferries for a week, so that every "
    "household keeps flour, candles and coal.",
)
"""English prose of many kinds. Of SmolLM2 at 3 bit random ids in its place lose 8 % more by
divergence, and so does a text with code, data and other languages."""
