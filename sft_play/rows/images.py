"""Pictures in rows -> references that messages hold, and a mark in the text for each.

Three forms are read: parts of OpenAI's messages, with the picture in them or in a column beside; and a list,
or one, beside texts with <image> (LLaMA-Factory, ms-swift). Columns of Parquet have the bytes.
"""

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib import request

from sft_play.rows.invalid import InvalidRow, found_text, invalid
from sft_play.units import format_bytes

MARK = "\ufdd2"  # no character: Unicode leaves it to programs, and texts have none
TAG = "<image>"
KEYS = ("images", "image")
PARTS = ("image", "image_url")
NAMES = ("image_url", "image", "bytes", "url", "path")  # of what a part, or a struct of a column, holds
URL_SECONDS, URL_BYTES, PART_BYTES = 30.0, 32 << 20, 1 << 16
OF_THE_WEB = (  # which leads to no file, and to no other protocol
    *(request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.HTTPRedirectHandler),
    *(request.HTTPErrorProcessor, request.HTTPDefaultErrorHandler, request.UnknownHandler),
)

Message = dict[str, Any]
Reference = str | bytes  # a path, a URL or a data: URL; or the picture


def references(value: object, key: str) -> list[Reference]:
    """Those of a row's, or a message's, value of `key`: none, one, or a list."""
    if value is None or isinstance(value, bool | int | float) or value in ("", [], {}):
        return []  # no pictures, such as `"image": false`
    if isinstance(value, list):
        return [_reference(item, f"{key}[{index}]") for index, item in enumerate(value)]
    return [_reference(value, key)]


def _reference(value: object, key: str) -> Reference:
    found = value
    while isinstance(found, dict):
        found = next((found[name] for name in NAMES if found.get(name)), None)
    if isinstance(found, bytes) or (isinstance(found, str) and found.strip()):
        return found
    raise invalid(key, value, "the path or URL of an image, or its bytes")


def without_pictures(content: list[Any], key: str) -> tuple[list[Any], Message]:
    """Parts of a message with marks as texts in place of pictures, and what it has of these.

    That is nothing, or images, with None for each that is beside the parts.
    """
    texts, found = list(content), list[Reference | None]()
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in PARTS:
            found.append(None)
            if any(part.get(name) for name in NAMES):
                found[-1] = _reference(part, f"{key}[{index}]")
            texts[index] = {"type": "text", "text": MARK}
    return texts, {"images": found} if found else {}


def placed(messages: Sequence[Message], data: Mapping[str, Any]) -> list[Message]:
    """The messages of a row with the pictures that it lists beside them.

    They go where the messages have parts without a picture, or else <image>, or else before the first turn of
    the user; InvalidRow if there are more or fewer places.
    """
    listed = [one for key in KEYS for one in references(data.get(key), key)]
    parts = sum(one is None for message in messages for one in message.get("images", ()))
    if not listed and not parts:
        return list(messages)
    places = parts or sum(message["content"].count(TAG) for message in messages)
    if places not in (0, len(listed)) or (parts and not listed):
        what = '{"type": "image"} parts without an image' if parts else f"{TAG} in its texts"
        raise InvalidRow(f"the row lists {len(listed)} images beside {places} {what}; expected one for each")
    if parts:
        rest = iter(listed)
        return [_filled(message, rest) for message in messages]
    if not places:
        first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
        messages = [*messages[:first], _begun(messages[first], len(listed)), *messages[first + 1 :]]
    rest = iter(listed)
    return [_tagged(message, rest) for message in messages]


def _filled(message: Message, rest: Iterator[Reference]) -> Message:
    if "images" not in message:
        return message
    return {**message, "images": [next(rest) if one is None else one for one in message["images"]]}


def with_pictures(message: Message, data: Mapping[str, Any], prefix: str) -> Message:
    """The message with the pictures that `data`, which it was read from, lists beside its text.

    They are in place of <image>, or before the text if it has none, as Ollama has them.
    """
    listed = [one for key in KEYS for one in references(data.get(key), f"{prefix}{key}")]
    if not listed:
        return message
    tags = message["content"].count(TAG)
    if tags not in (0, len(listed)):
        raise InvalidRow(f"{prefix}images has {len(listed)} images, but its text has {tags} {TAG}")
    return _tagged(message if tags else _begun(message, len(listed)), iter(listed))


def require_none(data: Mapping[str, Any]) -> None:
    """Raises InvalidRow if a row of plain text has pictures."""
    found = next((key for key in KEYS if references(data.get(key), key)), None)
    if found:
        raise InvalidRow(
            f"{found} is {found_text(data[found])}; images belong to messages, not to plain text"
        )


def _begun(message: Message, count: int) -> Message:
    """The message with <image> so often before its text."""
    return {**message, "content": TAG * count + message["content"]}


def _tagged(message: Message, rest: Iterator[Reference]) -> Message:
    """The message with a mark, and the next picture, for each <image> in its text."""
    texts = message["content"].split(TAG)
    if len(texts) == 1:
        return message
    found = [*message.get("images", ())]
    for index in range(len(texts) - 1):
        found.insert(sum(one.count(MARK) for one in texts[: index + 1]) + index, next(rest))
    return {**message, "content": MARK.join(texts), "images": found}


def as_written(message: Message) -> Message:
    """The message for a file of rows, with <image> in its text and its pictures beside it."""
    if "images" not in message:
        return message
    content = message["content"].replace(MARK, TAG)
    return {**message, "content": content, "images": list(_written(message["images"]))}


def _written(pictures: Iterable[Any]) -> Iterator[Any]:
    for one in pictures:
        if isinstance(one, dict):  # a picture that was looked at
            yield one["path"]
        else:
            yield data_url(one) if isinstance(one, bytes) else one


def data_url(content: bytes, kind: str = "image") -> str:
    """A data: URL of the bytes of a picture; `kind` is its media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def of_data_url(url: str) -> bytes:
    """What a data: URL holds; ValueError if it is none."""
    try:
        return request.urlopen(url).read()
    except ValueError:
        raise ValueError("its data: URL is damaged") from None


def downloaded(url: str) -> bytes:
    """The content of a URL of the web, within URL_SECONDS and URL_BYTES.

    Raises:
        ValueError: it takes longer, or is larger.
        OSError: it cannot be had.
    """
    asked = request.Request(url, headers={"User-Agent": "sft-play"})
    started, content, opener = time.monotonic(), bytearray(), request.OpenerDirector()
    for handler in OF_THE_WEB:
        opener.add_handler(handler())
    with opener.open(asked, timeout=URL_SECONDS) as answer:
        while part := answer.read1(PART_BYTES):
            content += part
            if len(content) > URL_BYTES:
                raise ValueError(f"it is larger than {format_bytes(URL_BYTES)}")
            if time.monotonic() - started > URL_SECONDS:
                raise ValueError(f"it takes longer than {URL_SECONDS:g} s")
    return bytes(content)
