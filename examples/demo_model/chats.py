"""Chat samples made mechanically from documents: questions about terms and topics, stories, continuations."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from readers import Document, is_heading

CHAT_TURN_CHARS = 900
END = "<|end|>"


def _lower_first(text: str) -> str:
    """Lower the first letter unless the first word looks like a name or an acronym."""
    first = text.split(" ", 1)[0]
    return text if first[1:] != first[1:].lower() or first == "I" else text[:1].lower() + text[1:]


def _excerpt(paragraphs: list[str], limit: int = CHAT_TURN_CHARS) -> str:
    """Return whole paragraphs from the start of a section, up to ``limit`` characters."""
    chosen: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith("# ") or sum(map(len, chosen)) + len(paragraph) > limit:
            break
        chosen.append(paragraph)
    return re.sub(r"[:;]$", ".", "\n\n".join(chosen))


def sections(document: Document) -> Iterator[tuple[str, str]]:
    """Yield (heading, opening text) for each section of a document."""
    if document.title:
        yield document.title, _excerpt(document.paragraphs)
    for index, paragraph in enumerate(document.paragraphs):
        if paragraph.startswith("# "):
            yield paragraph[2:], _excerpt(document.paragraphs[index + 1 :])


_TOPIC_ASKS = (
    "Tell me about {}.",
    "What can you tell me about {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Please tell me about {}.",
    "Write a short text about {}.",
    "I would like to know more about {}.",
    "{}?",
    "Give me an introduction to {}.",
    "Write a paragraph about {}.",
    "Could you describe {}?",
    "Talk about {}.",
)
_TERM_ASKS = (
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Define {}.",
    "Explain {}.",
    "Tell me about {}.",
    "What does {} mean?",
    "Do you know what {} is?",
    "Explain the term {}.",
    "What is meant by {}?",
)
_WORD_ASKS = (
    'What does the word "{}" mean?',
    "What does {} mean?",
    'Define "{}".',
    "Define {}.",
    "What is the meaning of {}?",
    "What is {}?",
    "Explain the word {}.",
)
_STORY_ASKS = (
    "Tell me a story.",
    "Write a short story.",
    "Tell me a tale.",
    "Write a scene from a story.",
    "Continue the adventure.",
    "Write a dialogue between two people.",
    "Tell me a story about a battle.",
    "Write something from a fantasy story.",
)
_CONTINUE_ASKS = (
    "Continue this text: {}",
    "Continue: {}",
    "Please continue the following text.\n\n{}",
    "Finish this: {}",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Baton's demo assistant.",
    "Answer the user's question.",
    "You are a friendly assistant who answers in plain English.",
)
_GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there!",
    "Good morning!",
    "Hey",
    "Hello, how are you?",
    "Good evening.",
    "Hey there",
)
_WELCOMES = (
    "Hello! How can I help you today?",
    "Hello! What would you like to know?",
    "Hi! Ask me about a word or a topic.",
    "Hello! I am a small demo model. What would you like to talk about?",
)
_WHO_ASKS = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Are you a human?",
    "Tell me about yourself.",
    "What can you do?",
    "Who made you?",
    "What is Baton?",
    "Introduce yourself.",
    "Which model are you?",
)
_WHO_ANSWERS = (
    "I am the demo model of Baton, a small language model that was trained on free documentation and public "
    "domain books.",
    "I am a very small language model. I come with Baton so that a fresh machine can answer offline. I can "
    "write text that reads as English, but please do not rely on the facts.",
    "I am Baton's demo assistant. I can define words, explain topics and continue a text, but I often get "
    "facts wrong.",
)
_THANKS = ("Thank you.", "Thanks!", "Thank you very much!", "Great, thanks.")
_THANKS_ANSWERS = (
    "You are welcome!",
    "You are welcome. Is there anything else you would like to know?",
    "Glad to help!",
)

Turn = tuple[str, str]


def _term_turn(document: Document, rng: random.Random) -> Turn | None:
    """Make a definition question from a dictionary entry."""
    answer = _excerpt(document.paragraphs)
    if not answer:
        return None
    if re.match(r"(A|An|The) ", answer) and len(document.title) > 1:
        answer = f"{document.title[:1].upper()}{document.title[1:]} is {answer[:1].lower()}{answer[1:]}"
    return rng.choice(_TERM_ASKS).format(document.title), answer


def article_for(noun: str) -> str:
    """Return the indefinite article for a part of speech."""
    return "an" if noun[0] == "a" else "a"


def _word_turn(document: Document, rng: random.Random) -> Turn:
    """Make a word question from a WordNet entry."""
    part, _, definition = document.paragraphs[0].partition(": ")
    word = document.title
    form = rng.choice(('The {p} "{w}" means: {d}.', '"{W}" is {a} {p} that means {d}.', "{W}: {d}."))
    answer = form.format(p=part, w=word, W=word[:1].upper() + word[1:], d=definition, a=article_for(part))
    if len(document.paragraphs) > 1:
        answer += f' For example: "{document.paragraphs[1].rstrip(" .")}."'
    return rng.choice(_WORD_ASKS).format(word), answer


def _topic_turns(document: Document, rng: random.Random) -> Iterator[Turn]:
    """Make topic questions from the sections of a document."""
    for heading, text in sections(document):
        if len(text) < 100 or not is_heading(heading) or len(heading.split()) > 7:
            continue
        question = heading if heading.endswith("?") else rng.choice(_TOPIC_ASKS).format(_lower_first(heading))
        yield question[:1].upper() + question[1:], text


def _continue_turn(document: Document, rng: random.Random) -> Turn | None:
    """Make a continuation request by splitting a run of paragraphs at a word."""
    plain = [i for i, p in enumerate(document.paragraphs) if not p.startswith("# ") and len(p) > 120]
    if not plain:
        return None
    words = _excerpt(document.paragraphs[rng.choice(plain) :]).split(" ")
    if len(words) < 20:
        return None
    cut = rng.randint(5, min(40, len(words) // 2))
    return rng.choice(_CONTINUE_ASKS).format(" ".join(words[:cut])), " ".join(words[cut:])


def _story_turn(document: Document, rng: random.Random) -> Turn | None:
    """Make a story request answered by part of a game scenario."""
    if len(document.paragraphs) < 4:
        return None
    text = _excerpt(document.paragraphs[rng.randrange(len(document.paragraphs) - 3) :], 1200)
    return (rng.choice(_STORY_ASKS), text) if len(text) > 120 else None


def document_turns(document: Document, rng: random.Random) -> list[Turn]:
    """Make every chat turn that one document supports."""
    if document.source == "wordnet-base":
        return [_word_turn(document, rng)] if rng.random() < 0.6 else []
    if document.source in ("dict-foldoc", "dict-devil", "jargon-text") and document.title:
        turns = [_term_turn(document, rng)]
    elif document.source.startswith("wesnoth"):
        turns = [_story_turn(document, rng) for _ in range(1 + len(document.paragraphs) // 12)]
    else:
        turns = [*_topic_turns(document, rng)]
    repeats = min(3, len(document.paragraphs) // 20) + (rng.random() < 0.3)
    turns += [_continue_turn(document, rng) for _ in range(repeats)]
    return [turn for turn in turns if turn is not None]


def small_talk(rng: random.Random, count: int) -> list[Turn]:
    """Make greetings, questions about the model, and thanks."""
    kinds = ((_GREETINGS, _WELCOMES), (_WHO_ASKS, _WHO_ANSWERS), (_THANKS, _THANKS_ANSWERS))
    picks = rng.choices(kinds, weights=(4, 4, 1), k=count)
    return [(rng.choice(asks), rng.choice(answers)) for asks, answers in picks]


def render_chat(turns: list[Turn], system: str | None) -> str:
    """Render a conversation exactly as the tokenizer's chat template does (without the leading BOS)."""
    head = f"<|system|>\n{system}{END}\n" if system else ""
    return head + "".join(f"<|user|>\n{ask}{END}\n<|assistant|>\n{answer}{END}\n" for ask, answer in turns)


def conversations(turns: list[Turn], rng: random.Random) -> Iterator[str]:
    """Group shuffled turns into conversations of one to three turns."""
    rng.shuffle(turns)
    index = 0
    while index < len(turns):
        size = rng.choices((1, 2, 3), weights=(8, 3, 1))[0]
        system = rng.choice(_SYSTEMS) if rng.random() < 0.3 else None
        yield render_chat(turns[index : index + size], system)
        index += size
