"""Why a request to S3 failed, in words: the client has them, among its inner workings."""

from __future__ import annotations

import html
import re

_LONGEST = 300
_SAID = re.compile(r"Error performing (\w+) \S+ in .*? - (.*)")
_STATUS = re.compile(r"Server returned non-2xx status code: ([^<]*?):? ?(<.*)?")
_CODE, _MESSAGE = (re.compile(rf"<{tag}>(.*?)</{tag}>") for tag in ("Code", "Message"))
_TAG = re.compile(r"<[^>]*>?")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_SYSTEM = re.compile(r'message: "([^"]+)"')
_CERTIFICATES = {
    "UnknownIssuer": "is signed by nobody whom we trust; AWS_CA_BUNDLE names a file of those",
    "Expired": "is out of date, or our clock is wrong",
    "NotValidYet": "is not valid yet, or our clock is wrong",
    "NotValidForName": "names another server",
}


def reason_of(error: Exception) -> str:
    """What the server or the system said, without the object's long name."""
    said, _, inner = str(error).partition("\n\nDebug source")
    text = " ".join(said.split())
    found = _SAID.search(text)
    if found:
        text = f"{found[1]}: {_answer(found[2])}"
    certificate, system = _CERTIFICATE.search(inner), _SYSTEM.search(inner)
    if certificate:
        kind = certificate[1].removesuffix("Context")
        text = f"its certificate {_CERTIFICATES.get(kind, f'is not valid: {kind}')}"
    elif _NO_TLS.search(inner):
        text = "what answers there does not speak https; is its endpoint http://...?"
    elif system and system[1] not in text:
        text = f"{text}: {system[1]}"
    return text[:_LONGEST] or type(error).__name__


def _answer(said: str) -> str:
    """A server's answer: its status, and of what it says in XML or HTML the words."""
    found = _STATUS.fullmatch(said)
    if found is None:
        return said
    status, body = found[1], found[2] or ""
    parts = [match[1] for tag in (_CODE, _MESSAGE) if (match := tag.search(body))]
    words = html.unescape(": ".join(parts) or _TAG.sub(" ", body))
    return ": ".join(filter(None, (status, " ".join(words.split()))))
