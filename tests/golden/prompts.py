"""24 prompts: chat and raw, 3 to 600 tokens, code, emoji, Hangul, digits."""

STORY = (
    "The old lighthouse stood on a narrow strip of rock, and every evening at {hour} o'clock the keeper climbed its "
    "{steps} steps with a lamp in one hand and a book in the other. "
)
LONG = "".join(STORY.format(hour=hour, steps=100 + 7 * hour) for hour in range(1, 15))
CODE = '''def quicksort(items):
    """Sort a list."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
'''

RAW = [
    "Once upon a",
    "The capital of France is",
    "In 2024, the population of 3 cities was 1,234,567 and",
    "3.14159265358979 is",
    CODE,
    "#include <stdio.h>\nint main(void) {\n\tprintf(",
    '{"name": "Ada", "born": 1815, "languages": [',
    "SELECT id, name FROM users WHERE",
    "안녕하세요, 저는 한국어로",
    "日本の首都は",
    "I ❤️ 🍕 and 👩‍👩‍👧‍👦 because",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    LONG[:1000],
    LONG,
]

CHAT = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea 🌊."}],
    [{"role": "user", "content": "What is 17 * 23? Answer with a number."}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is water wet?"}],
    [{"role": "user", "content": "Explain this code:\n" + CODE}],
    [{"role": "user", "content": "서울은 어떤 도시인가요?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Summarise:\n" + LONG[:600]}],
    [{"role": "user", "content": "List three fruits, one per line."}],
]
