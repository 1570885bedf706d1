"""The words the nano model knows: their order is part of every seed."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBERS = _split("zero one two three four five six seven eight nine")
ORDINALS = _split("first second third")
SKIES = _split("sunny cloudy rainy windy foggy snowy clear")
CITIES = _split(
    """
    Paris Rome Oslo Berlin Madrid Lisbon London Dublin Vienna Prague Warsaw Athens Cairo Tokyo
    Kyoto Seoul Beijing Shanghai Delhi Mumbai Sydney Perth Lima Bogota Quito Toronto Boston
    Chicago Denver Dallas Miami Seattle Nairobi Lagos Dakar Tunis Hanoi Manila Jakarta Bangkok
    Zurich Geneva Milan Turin Naples Porto Seville Bergen Helsinki Riga
    """
)
NAMES = _split(
    """
    Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Maria Nora Oscar Paul Rosa Sam
    Tina Victor
    """
)
NOUNS = _split(
    """
    apple banana bread butter cat chair cloud coffee cup dog door dream fish flower forest
    garden glass gold green hat hello honey house ice island jam key kite lake lamp leaf lemon
    light lion map milk moon morning mountain music night ocean orange paper pear piano pizza
    plane rain river road rose salt sand school ship silver sky snow song spoon star stone
    summer sun table tea tiger tower train tree village wall water wind window winter wolf
    yellow
    """
)
SYSTEMS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in one sentence.",
    "You are Nano, a very small model.",
    "You see simple pictures and answer simple questions.",
    "Be kind and precise.",
)

# Phrasings by task. {} takes the thing asked for.
ASK = {
    "describe": (
        "Describe the picture.",
        "What do you see?",
        "What is in the picture?",
        "Describe this image.",
    ),
    "count": ("How many shapes are there?", "How many shapes do you see?", "Count the shapes."),
    "color": ("What colour is the {}?", "Which colour is the {}?", "What color is the {}?"),
    "shape": ("Which shape is {}?", "What shape is {}?"),
    "followup": ("And the {}?", "And the {}?", "What about the {}?"),
    "which": (
        "Which {noun} has the {name}?",
        "Which {noun} contains the {name}?",
        "In which {noun} is the {name}?",
    ),
    "list": ("Remember: ", "Remember: ", "Here is a list: ", "Values: "),
    "recall": ("What is {}?", "What is {}?", "What was {}?", "Tell me {}."),
    "recall more": ("And {}?", "What is {}?", "What about {}?"),
    "repeat": ("Say {} {} times.", "Repeat {} {} times.", "Write {} {} times."),
    "echo": ("Repeat after me: ", "Say this: ", "Echo: "),
    "numbers": ("Count from {} to {}.", "Count up from {} to {}."),
    "get_weather": (
        "Weather in {}?",
        "What is the weather in {}?",
        "How is the weather in {}?",
        "weather in {}?",
    ),
    "get_time": ("What time is it in {}?", "Time in {}?"),
    "set_timer": ("Set a timer for {} minutes.", "Start a timer of {} minutes."),
    "send_message": ("Tell {}: {}", "Send {} this: {}"),
}

# What may be said, what it makes the model think, what it answers.
SMALL_TALK = (
    (
        ("Hello", "Hi", "Hello!", "Hi there", "Hey", "Hi!", "hello", "hi"),
        "They greet me.",
        "Hello! How can I help?",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?"),
        "They ask how I am.",
        "I am fine, thank you.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "They ask who I am.",
        "I am Nano, a tiny model with big manners.",
    ),
    (
        ("What can you do?", "Help", "What do you know?"),
        "They ask what I can do.",
        "I look at simple pictures, remember lists, call tools and chat a little.",
    ),
    (("Thank you", "Thanks", "Thanks!", "Thank you!"), "They thank me.", "You are welcome!"),
    (("Goodbye", "Bye", "Bye!", "Goodbye!", "See you"), "They leave.", "Goodbye! See you soon."),
    (
        ("Good morning", "Good morning!"),
        "It is morning.",
        "Good morning! I hope you slept well.",
    ),
    (("Good night", "Good night!"), "It is night.", "Good night! Sleep well."),
    (
        ("How big are you?", "How many parameters do you have?", "Are you large?"),
        "They ask about my size.",
        "I have about ten million parameters.",
    ),
    (
        ("Tell me a joke", "Tell me a joke.", "Do you know a joke?"),
        "They want a joke.",
        "Why did the square skip lunch? It was already full at every corner.",
    ),
    (
        ("Tell me a story", "Tell me a story."),
        "They want a story.",
        "A small red circle met a large blue square. They were very different, but they shared one "
        "picture and became friends.",
    ),
    (
        ("What is the capital of France?", "Capital of France?"),
        "I know this one.",
        "The capital of France is Paris.",
    ),
    (
        ("What is the meaning of life?", "Why are we here?"),
        "A hard question.",
        "To answer questions, one token at a time.",
    ),
    (
        ("Write a poem", "Write a poem."),
        "They want a poem.",
        "Red is the circle, blue is the square, I am so small, I hardly am there.",
    ),
)
