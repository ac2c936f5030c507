"""A server of an installed wheel, and OpenAI's own client."""

import json
import re
import signal
import subprocess

from openai import BadRequestError, OpenAI

ASKED = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]


def talk(client: OpenAI) -> None:
    """What OpenAI's clients ask for most."""
    [model] = client.models.list().data
    how = {"model": model.id, "max_tokens": 32, "temperature": 0.0}
    whole = client.chat.completions.create(messages=ASKED, **how).choices[0]
    assert whole.message.content
    assert whole.finish_reason in ("stop", "length")
    events = list(
        client.chat.completions.create(
            messages=ASKED, stream=True, stream_options={"include_usage": True}, **how
        )
    )
    pieces = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(pieces) == whole.message.content, "a stream says what a whole answer says"
    print(whole.message.content, events[-1].usage)
    plain = client.chat.completions.create(messages=ASKED, extra_body={"drafter": "vanilla"}, **how)
    assert plain.choices[0].message.content == whole.message.content, "a draft changes no text"
    name = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"name": name}, "required": ["name"]}
    schema["additionalProperties"] = False  # otherwise other names may follow, up to the last token
    bound = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    person = client.chat.completions.create(
        messages=[{"role": "user", "content": "Who wrote Faust?"}], response_format=bound, **how
    )
    print(json.loads(person.choices[0].message.content))
    several = client.completions.create(prompt=["One, two,", "The capital of France is"], n=2, **how)
    assert len(several.choices) == 4
    try:
        client.chat.completions.create(messages=[], **how)
    except BadRequestError as error:
        print(error.message)
    else:
        raise AssertionError("no messages were answered")


command = ["slipstream", "serve", "--port", "0", "--drafter", "ngram", "--rows", "4"]
with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if at := re.search(r"http://127\.0\.0\.1:\d+/v1", line):
                break
        else:
            raise RuntimeError("".join(said))
        talk(OpenAI(base_url=at[0], api_key="none is needed", max_retries=20))
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    finally:
        server.kill()
assert server.returncode == 0, server.returncode
