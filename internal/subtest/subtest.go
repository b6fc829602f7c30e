// Package subtest runs the rows of tables as subtests. Tests alone may import it.
package subtest

import (
	"testing"
	"testing/synctest"
)

// InBubble runs a row of a table in a bubble of fake time.
func InBubble(t *testing.T, name string, row func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, row) })
}
