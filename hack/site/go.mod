// The documentation as a site. A module of its own, so that nothing else depends on what renders Markdown.
module github.com/quartermaster-dev/quartermaster/hack/site

go 1.26.0

require (
	github.com/alecthomas/chroma/v2 v2.27.0
	github.com/yuin/goldmark v1.8.7
	github.com/yuin/goldmark-highlighting/v2 v2.0.0-20230729083705-37449abec8cc
)

require github.com/dlclark/regexp2/v2 v2.2.1 // indirect
