// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A white panel with a border reads well on light and on dark pages.
var (
	white  = color.RGBA{0xff, 0xff, 0xff, 0xff}
	border = color.RGBA{0xd0, 0xd7, 0xde, 0xff}
	grid   = color.RGBA{0xe6, 0xea, 0xef, 0xff}
	ink    = color.RGBA{0x1f, 0x23, 0x28, 0xff}
	faint  = color.RGBA{0x57, 0x60, 0x6a, 0xff}
	strong = color.RGBA{0x09, 0x69, 0xda, 0xff} // ours
	pale   = color.RGBA{0x8c, 0x95, 0x9f, 0xff} // others
)

const (
	width      = vg.Length(640)
	margin     = vg.Length(20)
	labels     = vg.Length(205) // the width of the column of names
	lineHeight = vg.Length(20)
	heading    = vg.Length(58) // title and subtitle
	footing    = vg.Length(50) // axis, and where the figures come from
)

// canvas draws from the top left.
type canvas struct {
	draw.Canvas
	height vg.Length
}

func (c canvas) point(x, y vg.Length) vg.Point { return vg.Point{X: x, Y: c.height - y} }

// text draws s around the height y, on white, so that no line of the grid runs through it.
func (c canvas) text(x, y, size vg.Length, bold bool, col color.Color, align text.XAlignment, s string) {
	f := font.From(plot.DefaultFont, size)
	f.Variant = "Sans"
	if bold {
		f.Weight = 2 // bold
	}
	style := text.Style{Color: col, Font: f, XAlign: align, YAlign: text.YCenter, Handler: plot.DefaultTextHandler}
	begin := x + vg.Length(align)*style.Width(s)
	c.FillPolygon(white, []vg.Point{c.point(begin-2, y-size*0.7), c.point(begin+style.Width(s)*1.1, y-size*0.7), c.point(begin+style.Width(s)*1.1, y+size*0.7), c.point(begin-2, y+size*0.7)})
	c.FillText(style, c.point(x, y-1.5), s) // the middle of small letters
}

func (c canvas) line(x1, y1, x2, y2, thick vg.Length, col color.Color) {
	c.StrokeLine2(draw.LineStyle{Color: col, Width: thick}, x1, c.height-y1, x2, c.height-y2)
}

// draw returns the picture as SVG.
func (p picture) draw(rows []row) ([]byte, error) {
	provenance, err := p.provenance(rows)
	if err != nil {
		return nil, err
	}
	height := heading + footing
	for _, g := range p.groups {
		height += lineHeight * vg.Length(len(g.lines)+1)
	}
	svg := vgsvg.New(width, height)
	c := canvas{draw.New(svg), height}
	c.panel()
	c.text(margin, 24, 16, true, ink, text.XLeft, p.title)
	c.text(margin, 43, 10, false, faint, text.XLeft, p.subtitle)
	c.text(margin, height-14, 8, false, faint, text.XLeft, provenance)
	p.axis(c)
	y := heading + lineHeight/2
	for _, g := range p.groups {
		c.text(margin, y+2, 10, true, ink, text.XLeft, g.title)
		y += lineHeight
		for _, l := range g.lines {
			r, err := l.findRow(rows)
			if err != nil {
				return nil, err
			}
			p.line(c, y, l, r)
			y += lineHeight
		}
	}
	var out bytes.Buffer
	if _, err := svg.WriteTo(&out); err != nil {
		return nil, err
	}
	// The fonts of the reader's machine.
	return bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Helvetica,Arial,Liberation Sans,sans-serif;")), nil
}

// panel draws the background, with round corners.
func (c canvas) panel() {
	const radius, inset = vg.Length(8), vg.Length(0.5)
	var path vg.Path
	w, h := width-inset, c.height-inset
	path.Move(vg.Point{X: inset + radius, Y: inset})
	for i, corner := range []vg.Point{{X: w - radius, Y: inset + radius}, {X: w - radius, Y: h - radius}, {X: inset + radius, Y: h - radius}, {X: inset + radius, Y: inset + radius}} {
		path.Arc(corner, radius, float64(i-1)*math.Pi/2, math.Pi/2)
	}
	path.Close()
	c.SetColor(white)
	c.Fill(path)
	c.SetColor(border)
	c.SetLineWidth(1)
	c.Stroke(path)
}

// position returns where a value is.
func (p picture) position(value float64) vg.Length {
	left, right := margin+labels, width-margin-30
	share := value / p.max
	if p.log {
		share = math.Log(value/p.min) / math.Log(p.max/p.min)
	}
	return left + vg.Length(share)*(right-left)
}

// axis draws the grid, with its figures at the bottom.
func (p picture) axis(c canvas) {
	ticks := []float64{0, 100, 200, 300, 400, 500, 600}
	if p.log {
		ticks = []float64{0.01, 0.1, 1, 10}
	}
	bottom := c.height - footing + 4
	for _, tick := range ticks {
		c.line(p.position(tick), heading, p.position(tick), bottom, 1, grid)
		c.text(p.position(tick), bottom+10, 9, false, faint, text.XCenter, p.format(tick))
	}
}

// line draws one line of the picture.
func (p picture) line(c canvas, y vg.Length, l line, r row) {
	col, bold := pale, strings.HasPrefix(l.name, "Quartermaster")
	if bold {
		col = strong
	}
	c.text(margin+14, y, 10, bold, ink, text.XLeft, l.name)
	switch {
	case l.substitute != "":
		c.text(margin+labels+6, y, 10, false, faint, text.XLeft, l.substitute)
	case p.log:
		c.line(margin+labels, y, p.position(r.Min), y, 1, grid)
		c.line(p.position(r.Min), y, p.position(r.P99), y, 5, col)
		c.SetColor(col)
		var dot vg.Path
		dot.Move(vg.Point{X: p.position(r.Median) + 5, Y: c.height - y})
		dot.Arc(vg.Point{X: p.position(r.Median), Y: c.height - y}, 5, 0, 2*math.Pi)
		dot.Close()
		c.Fill(dot)
		c.text(max(p.position(r.P99), p.position(r.Median)+5)+6, y, 10, bold, ink, text.XLeft, p.format(r.Median))
	default:
		c.line(p.position(0), y, p.position(r.Median), y, 12, col)
		c.text(p.position(r.Median)+6, y, 10, bold, ink, text.XLeft, p.format(r.Median))
	}
}

// format returns a figure with its unit.
func (p picture) format(value float64) string {
	switch {
	case !p.log:
		return fmt.Sprintf("%.0f MiB", value)
	case value < 0.01:
		return fmt.Sprintf("%.1f ms", value*1000)
	case value < 1:
		return fmt.Sprintf("%.0f ms", value*1000)
	case value < 10 && value != math.Trunc(value):
		return fmt.Sprintf("%.1f s", value)
	}
	return fmt.Sprintf("%.0f s", value)
}
