"""
The pictures of the documentation, written to `docs/pictures` by `make pictures`.

`diagrams` and `flows` draw what the pages explain, `charts` the benchmarks from the output on their
page, `terminals` what `record` has recorded on a real cluster. `svg` is the drawing, for all of
them. The pictures depend on nothing but these files and the recordings: the same bytes each time.
"""
