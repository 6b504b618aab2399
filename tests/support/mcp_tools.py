"""Tools with schemas like those that public MCP servers publish, after their documentation: with
the keywords that zod, pydantic and hand-written JSON Schema leave in them."""

from typing import Any

Json = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"


def tool(name: str, description: str, required: str = "", /, **properties: Any) -> Json:
    """A tool; `required` lists names."""
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def zod(given: Json) -> Json:
    """What zod-to-json-schema adds."""
    given["function"]["parameters"] |= {"additionalProperties": False, "$schema": DRAFT}
    return given


def text(description: str = "", **more: Any) -> Json:
    return {"type": "string", "description": description, **more}


def number(description: str = "", **more: Any) -> Json:
    return {"type": "number", "description": description, **more}


def flag(default: bool = False) -> Json:
    return {"type": "boolean", "default": default}


def texts(description: str = "", **more: Any) -> Json:
    return {"type": "array", "items": {"type": "string"}, "description": description, **more}


def items(**properties: Any) -> Json:
    return {
        "type": "array",
        "items": {"type": "object", "properties": properties, "required": list(properties)},
    }


def optional(schema: Json) -> Json:
    """As pydantic writes it."""
    return {"anyOf": [schema, {"type": "null"}], "default": None, "title": "Optional"}


PATH = text("Path within an allowed directory")
OWNER = {"owner": text("Account that owns the repository"), "repo": text("Name of the repository")}
PAGES = {
    "page": number("Page of the results, from 1", minimum=1),
    "perPage": number("Results on a page", minimum=1, maximum=100),
}

SERVERS: dict[str, list[Json]] = {
    "filesystem": [
        zod(tool("read_text_file", "Read a text file.", "path", path=PATH, head=number("Lines"))),
        zod(tool("read_multiple_files", "Read several files.", "paths", paths=texts(minItems=1))),
        zod(tool("write_file", "Write a file.", "path content", path=PATH, content=text())),
        zod(
            tool(
                "edit_file",
                "Replace text in a file; returns a diff.",
                "path edits",
                path=PATH,
                edits=items(oldText=text("Text to find"), newText=text("Text instead")),
                dryRun=flag(),
            )
        ),
        zod(
            tool(
                "list_directory_with_sizes",
                "List a directory.",
                "path",
                path=PATH,
                sortBy=text(enum=["name", "size"], default="name"),
            )
        ),
        zod(
            tool(
                "search_files",
                "Find files by a pattern.",
                "path pattern",
                path=PATH,
                pattern=text("A glob"),
                excludePatterns=texts(default=[]),
            )
        ),
        zod(tool("list_allowed_directories", "List what may be accessed.")),
    ],
    "github": [
        zod(
            tool(
                "create_or_update_file",
                "Commit one file.",
                "owner repo path content message branch",
                **OWNER,
                path=text(),
                content=text(),
                message=text(),
                branch=text(),
                sha=text("Blob to replace", pattern="^[0-9a-f]{40}$"),
            )
        ),
        zod(
            tool(
                "push_files",
                "Commit several files.",
                "owner repo branch files message",
                **OWNER,
                branch=text(),
                files=items(path=text(), content=text()),
                message=text(),
            )
        ),
        zod(
            tool(
                "search_repositories",
                "Search repositories.",
                "query",
                query=text(),
                **PAGES,
            )
        ),
        zod(
            tool(
                "list_issues",
                "List and filter issues.",
                "owner repo",
                **OWNER,
                **PAGES,
                direction=text(enum=["asc", "desc"]),
                labels=texts(),
                since=text(format="date-time"),
                sort=text(enum=["created", "updated", "comments"]),
                state=text(enum=["open", "closed", "all"]),
            )
        ),
        zod(
            tool(
                "create_pull_request_review",
                "Review a pull request.",
                "owner repo pull_number body event",
                **OWNER,
                pull_number=number(),
                commit_id=text(),
                body=text(),
                event=text(enum=["APPROVE", "REQUEST_CHANGES", "COMMENT"]),
                comments={
                    "type": "array",
                    "items": {
                        "anyOf": [
                            items(path=text(), position=number(), body=text())["items"],
                            items(path=text(), line=number(), body=text())["items"],
                        ]
                    },
                },
            )
        ),
        zod(
            tool(
                "merge_pull_request",
                "Merge a pull request.",
                "owner repo pull_number",
                **OWNER,
                pull_number=number(),
                merge_method=text(enum=["merge", "squash", "rebase"]),
            )
        ),
    ],
    "slack": [
        tool(
            "slack_list_channels",
            "List public channels.",
            limit=number("At most 200", default=100, maximum=200),
            cursor=text(),
        ),
        tool("slack_post_message", "Post.", "channel_id text", channel_id=text(), text=text()),
        tool(
            "slack_reply_to_thread",
            "Reply in a thread.",
            "channel_id thread_ts text",
            channel_id=text(),
            thread_ts=text("Timestamp such as 1234567890.123456", pattern=r"^\d{10}\.\d{6}$"),
            text=text(),
        ),
        tool(
            "slack_add_reaction",
            "React to a message.",
            "channel_id timestamp reaction",
            channel_id=text(pattern=r"^[CDG][A-Z0-9]{8,}$"),
            timestamp=text(),
            reaction=text("Emoji without colons", pattern=r"^(?!:).+$"),
        ),
    ],
    "postgres": [
        tool("query", "Run a read-only query.", sql=text()),
        tool(
            "explain_query",
            "Explain a query's plan.",
            "sql",
            sql=text(),
            analyze=flag(),
            hypothetical_indexes={
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "table": text(),
                        "columns": texts(uniqueItems=True),
                        "using": text(default="btree"),
                    },
                    "required": ["table", "columns"],
                },
                "default": [],
            },
        ),
        tool(
            "analyze_workload_indexes",
            "Recommend indexes.",
            max_index_size_mb={"type": "integer", "default": 10000, "title": "Max size"},
            method={"enum": ["dta", "llm"], "default": "dta"},
        ),
    ],
    "puppeteer": [
        tool(
            "puppeteer_navigate",
            "Open an address.",
            "url",
            url=text(format="uri"),
            launchOptions={"type": "object", "description": "Options of the browser"},
            allowDangerous=flag(),
        ),
        tool(
            "puppeteer_screenshot",
            "Take a screenshot.",
            "name",
            name=text(),
            selector=text("CSS"),
            width=number("Pixels", default=800, exclusiveMinimum=0),
            height=number("Pixels", default=600, exclusiveMinimum=0),
        ),
        tool("puppeteer_evaluate", "Run JavaScript.", "script", script=text()),
    ],
    "memory": [
        zod(
            tool(
                "create_entities",
                "Add entities to the graph.",
                "entities",
                entities=items(name=text(), entityType=text(), observations=texts()),
            )
        ),
        zod(
            tool(
                "create_relations",
                "Add relations.",
                "relations",
                relations=items(**{"from": text(), "to": text(), "relationType": text()}),
            )
        ),
        zod(tool("read_graph", "Read the whole graph.")),
        zod(tool("search_nodes", "Search.", "query", query=text())),
    ],
    "fetch": [
        tool(
            "fetch",
            "Fetch a page as Markdown.",
            "url",
            url={"format": "uri", "minLength": 1, "title": "Url", "type": "string"},
            max_length={
                "default": 5000,
                "exclusiveMaximum": 1000000,
                "exclusiveMinimum": 0,
                "type": "integer",
            },
            raw=flag(),
        )
    ],
    "git": [
        tool("git_status", "Status.", "repo_path", repo_path=text()),
        tool("git_add", "Stage files.", "repo_path files", repo_path=text(), files=texts()),
        tool(
            "git_log",
            "Commits.",
            "repo_path",
            repo_path=text(),
            max_count={"type": "integer", "default": 10},
            start_timestamp=optional({"type": "string"}),
        ),
        tool(
            "git_branch",
            "Branches.",
            "repo_path branch_type",
            repo_path=text(),
            branch_type=text("local, remote or all"),
            contains=optional({"type": "string"}),
        ),
    ],
    "sequentialthinking": [
        tool(
            "sequentialthinking",
            "Think in steps. " * 100,
            "thought nextThoughtNeeded thoughtNumber totalThoughts",
            thought=text("The current step"),
            nextThoughtNeeded={"type": "boolean"},
            thoughtNumber={"type": "integer", "minimum": 1},
            totalThoughts={"type": "integer", "minimum": 1},
            isRevision={"type": "boolean"},
        )
    ],
    "notion": [  # made from an OpenAPI document, with what that leaves in
        {
            "type": "function",
            "function": {
                "name": "API-post-page",
                "description": "Create a page.",
                "parameters": {
                    "type": "object",
                    "required": ["parent"],
                    "properties": {
                        "parent": {
                            "oneOf": [
                                {"$ref": "#/$defs/pageParent"},
                                {"$ref": "#/$defs/databaseParent"},
                            ]
                        },
                        "properties": {
                            "type": "object",
                            "propertyNames": {"type": "string"},
                            "additionalProperties": True,
                        },
                        "children": {"type": "array", "items": {"$ref": "#/$defs/block"}},
                        "icon": {"type": "string", "format": "json"},
                    },
                    "$defs": {
                        "pageParent": {
                            "type": "object",
                            "properties": {"page_id": {"type": "string", "format": "uuid"}},
                        },
                        "databaseParent": {
                            "type": "object",
                            "properties": {"database_id": {"type": "string", "format": "uuid"}},
                        },
                        "block": {
                            "type": "object",
                            "properties": {
                                "type": {"enum": ["paragraph", "heading_1"]},
                                "children": {"type": "array", "items": {"$ref": "#/$defs/block"}},
                            },
                            "required": ["type"],
                        },
                    },
                },
            },
        },
        tool(
            "API-get-comments",
            "Comments of a block.",
            "block_id",
            block_id=text(format="uuid"),
            page_size={"type": "integer", "default": 100},
            filter={
                "type": "object",
                "if": {"properties": {"by": {"const": "user"}}},
                "then": {"required": ["user"]},
                "not": {"required": ["team"]},
                "dependentRequired": {"after": ["before"]},
                "patternProperties": {"^x-": {"type": "string"}},
            },
        ),
    ],
    "everything": [
        zod(tool("echo", "Echo.", "message", message=text())),
        zod(tool("printEnv", "Print the environment.")),
        tool(
            "structuredContent",
            "The weather.",
            "location",
            location={"type": "string", "minLength": 1, "enum": ["New York", "Los Angeles"]},
        ),
        {"type": "function", "function": {"name": "ping", "parameters": {}}},
        {"type": "function", "function": {"name": "pong", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "bare"}},
    ],
}
TOOLS = [one for tools in SERVERS.values() for one in tools]
