"""The pages of the service: one HTML document each, which loads nothing from elsewhere.

A comment with the name of a file, such as <!-- head.html -->, stands for its content.
"""

from importlib.resources import files

from drm_triton.report.page import content_hash

PAGES = {"/": ("index.html", "Recommendations"), "/docs": ("docs.html", "Requests")}  # path -> file, title


def page(path: str) -> tuple[str, dict[str, str]]:
    """Return the HTML of a page, and headers that let a browser run nothing but the script in it.

    Examples
    --------
    >>> html, headers = page("/")
    >>> html[:15], "script-src 'sha256-" in headers["Content-Security-Policy"]
    ('<!DOCTYPE html>', True)
    """
    folder, (name, title) = files(__package__), PAGES[path]
    style, html, head, token = (
        (folder / file).read_text("utf-8") for file in ("style.css", name, "head.html", "token.html")
    )
    html = html.replace("<!-- head.html -->\n", head).replace("<!-- token.html -->\n", token)
    html = html.replace("<!-- title -->", title).replace("/* style.css */", style)
    script = html.split("<script>", 1)[1].split("</script>", 1)[0]
    policy = (
        f"default-src 'none'; style-src '{content_hash(style)}'; script-src '{content_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
