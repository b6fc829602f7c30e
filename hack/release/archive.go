// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"io/fs"
	"time"
)

// file is a file of an archive.
type file struct {
	Name    string
	Mode    fs.FileMode
	Content []byte
	Link    string // if this is a symbolic link
}

// makeTarGz returns a gzipped tar.
func makeTarGz(modified time.Time, files []file) ([]byte, error) {
	archive, err := makeTar(modified, files)
	if err != nil {
		return nil, err
	}
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	if _, err := compressed.Write(archive); err != nil {
		return nil, err
	}
	err = compressed.Close()
	return buffer.Bytes(), err
}

// makeTar returns a tar. It says nothing about who made it, on which machine and when.
func makeTar(modified time.Time, files []file) ([]byte, error) {
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	for _, f := range files {
		header := &tar.Header{Name: f.Name, Mode: int64(f.Mode), Size: int64(len(f.Content)), ModTime: modified}
		if f.Link != "" {
			header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Link, 0o777
		}
		if err := archive.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(f.Content); err != nil {
			return nil, err
		}
	}
	err := archive.Close()
	return buffer.Bytes(), err
}

func makeZip(modified time.Time, files []file) ([]byte, error) {
	var buffer bytes.Buffer
	archive := zip.NewWriter(&buffer)
	for _, f := range files {
		header := &zip.FileHeader{Name: f.Name, Method: zip.Deflate, Modified: modified}
		header.SetMode(f.Mode)
		w, err := archive.CreateHeader(header)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(f.Content); err != nil {
			return nil, err
		}
	}
	err := archive.Close()
	return buffer.Bytes(), err
}
