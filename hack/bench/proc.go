// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
)

// clockTicks is the unit of CPU times in /proc, in 1/s: USER_HZ, which is 100 on all of Go's
// architectures.
const clockTicks = 100

// residence is the resident memory of a process, in MiB.
type residence struct {
	current   float64
	peak      float64 // the highest value of current since the start
	anonymous float64 // the part of current that is heap and stacks, not files such as the program itself
}

func readResidence(pid int) (r residence, err error) {
	for name, value := range map[string]*float64{"VmRSS": &r.current, "VmHWM": &r.peak, "RssAnon": &r.anonymous} {
		text, _, _ := strings.Cut(readField(fmt.Sprintf("/proc/%d/status", pid), name+":"), " ")
		kib, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return r, err
		}
		*value = kib / 1024
	}
	return r, nil
}

// cpuSeconds returns the CPU time of a process, user and system.
func cpuSeconds(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may contain blanks. After it, utime and stime are the fields 14 and
	// 15 of proc(5).
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	var sum float64
	for _, text := range fields[11:13] {
		ticks, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return 0, err
		}
		sum += ticks
	}
	return sum / clockTicks, nil
}

// get returns the body of a response with status 200.
func get(client *http.Client, url string) ([]byte, error) {
	resp, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return data, err
}
