"""The tool of calculator.py on an MCP server with the official SDK: `python calculator_server.py` serves over stdio."""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

sys.path.insert(0, str(Path(__file__).parent))
from calculator import calculate

server = MCPServer("calculator", log_level="ERROR")


@server.tool(name="calculate", description=calculate.__doc__)
def calculate_tool(expression: str) -> str:
    try:
        return calculate(expression)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise ToolError(str(error)) from error  # returned to the model


if __name__ == "__main__":
    server.run()
