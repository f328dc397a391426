"""The pages of the service: one HTML file each, which loads nothing from elsewhere."""

from importlib.resources import files

from drm_triton.report.page import content_hash

FILES = {"/": "index.html", "/docs": "docs.html"}


def page(path: str) -> tuple[str, dict[str, str]]:
    """Return the HTML of a page, and headers that let a browser run nothing but the script in it.

    Examples
    --------
    >>> html, headers = page("/")
    >>> html[:15], "script-src 'sha256-" in headers["Content-Security-Policy"]
    ('<!DOCTYPE html>', True)
    """
    folder = files(__package__)
    style = (folder / "style.css").read_text("utf-8")
    html = (folder / FILES[path]).read_text("utf-8").replace("/* style.css */", style)
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
