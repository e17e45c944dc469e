"""The page of `lockstep report`: run directories, records and plans → values → sections → one HTML file.

`page_source` finds and reads, `shown_run` is a run, `shown_plans` a prediction, `markup` and `figure` are
what sections are made of, `write_page` puts them together with page.css, page.js and plotly's script.
"""
