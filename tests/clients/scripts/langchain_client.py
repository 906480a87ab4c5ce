"""LangChain's OpenAI package: chat model, completion model, embeddings, structured output, tools, streams, batches."""

from __future__ import annotations

import asyncio
from typing import Literal

import pydantic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from reporter import Report, arguments, expect

QUESTION = "What does os.path.join do?"


class Review(pydantic.BaseModel):
    """What you think."""

    verdict: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


@tool
def review(verdict: Literal["good", "bad"]) -> str:
    """Say what you think."""
    return verdict


def main() -> int:
    given = arguments()
    report = Report()
    server = {"base_url": f"{given.url}/v1", "api_key": "none", "model": given.model, "max_retries": 0}
    chat = ChatOpenAI(**server, temperature=0, max_completion_tokens=60)
    with report.exercise("invoke and stream alike, usage"):
        whole = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
        chunks = list(chat.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)], stream_usage=True))
        expect("".join(chunk.text for chunk in chunks) == whole.text, chunks)
        expect(whole.usage_metadata["total_tokens"] > 0, whole)
    with report.exercise("batch and ainvoke"):
        first, second = chat.batch([QUESTION, "What is heapq?"])
        expect(asyncio.run(chat.ainvoke(QUESTION)).text == first.text, first)
        expect(isinstance(second, AIMessage), second)
    with report.exercise("logprobs"):
        answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
        expect(answer.response_metadata["logprobs"]["content"], answer)
    with report.exercise("with_structured_output, json_schema and function_calling"):
        for method in ("json_schema", "function_calling"):
            found = chat.with_structured_output(Review, method=method).invoke(QUESTION)
            expect(isinstance(found, Review), found)
    with report.exercise("bind_tools, a call streamed and its result handed back"):
        bound = chat.bind_tools([review], tool_choice="any")
        asked = bound.invoke(QUESTION)
        call = asked.tool_calls[0]
        expect(call["name"] == "review" and call["args"]["verdict"] in ("good", "bad"), asked)
        gathered = None
        for chunk in bound.stream(QUESTION):
            gathered = chunk if gathered is None else gathered + chunk
        expect(gathered.tool_calls[0]["args"] == call["args"], gathered)
        result = ToolMessage(review.invoke(call["args"]), tool_call_id=call["id"])
        expect(isinstance(chat.invoke([HumanMessage(QUESTION), asked, result]), AIMessage), "no answer")
    with report.exercise("the completion model, whole and streamed"):
        model = OpenAI(**server, temperature=0, max_tokens=12)
        expect("".join(model.stream("import ")) == model.invoke("import "), "they differ")
    with report.exercise("embeddings: documents as queries, batches, asynchronous"):
        # else it would send ids of OpenAI's own tokenizer
        options = {"api_key": "none", "model": given.model, "check_embedding_ctx_length": False}
        embeddings = OpenAIEmbeddings(base_url=f"{given.embedding_url}/v1", chunk_size=2, **options)
        documents = embeddings.embed_documents(["one", "two", "three"])
        expect(documents[1] == embeddings.embed_query("two"), documents)
        expect(asyncio.run(embeddings.aembed_documents(["one", "two", "three"])) == documents, documents)
        short = OpenAIEmbeddings(base_url=f"{given.embedding_url}/v1", dimensions=32, **options)
        expect(len(short.embed_query("two")) == 32, short)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
