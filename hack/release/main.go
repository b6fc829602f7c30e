// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command release writes a release to a folder: for each platform an archive with the manager and
// its bill of materials, the image as an OCI archive, the Helm chart, the notes from CHANGELOG.md,
// and the checksums of all files. `make release` runs it; `make image` and `make sbom` run it for a
// part of a release. It needs neither a container tool nor the network, except for modules that Go
// has not downloaded yet.
//
// The same commit, version and version of Go give the same checksums.
package main

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r := release{Log: os.Stderr}
	flag.StringVar(&r.Version, "version", "", "the `version`, vX.Y.Z, which CHANGELOG.md must have a section for")
	flag.StringVar(&r.Out, "out", "dist", "the `folder` to write; what is in it is deleted first")
	name := flag.String("image", "", "write only the image, by this `name`, to bin/, of the binaries in bin/")
	sbom := flag.String("sbom", "", "write only the bill of materials of this `binary` and the licenses, beside it")
	flag.Parse()
	r.Platforms = flag.Args()
	var err error
	switch {
	case *name != "":
		err = r.writeImage(ctx, *name)
	case *sbom != "":
		err = writeMaterials(ctx, *sbom, r.Version)
	default:
		err = r.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

// release says what to write. It is run in the folder of the repository.
type release struct {
	Version   string
	Out       string
	Platforms []string // OS/ARCH; the linux platforms are in the image
	Log       io.Writer

	revision string
	time     time.Time // of every file in every archive
}

func (r release) run(ctx context.Context) error {
	if len(r.Platforms) == 0 {
		return fmt.Errorf("usage: release --version=vX.Y.Z OS/ARCH [OS/ARCH]")
	}
	changelog, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	notes, err := releaseNotes(string(changelog), r.Version)
	if err != nil {
		return err
	}
	if err := r.readCommit(ctx); err != nil {
		return err
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	if err := r.build(ctx); err != nil {
		return err
	}
	files, digest, err := r.files(ctx)
	if err != nil {
		return err
	}
	files["RELEASE_NOTES.md"] = []byte(notes)
	if err := writeFiles(r.Out, files); err != nil {
		return err
	}
	fmt.Fprintf(r.Log, "Wrote %d files to %s. The image's digest is %s\n", len(files)+1, r.Out, digest)
	return nil
}

// writeImage writes the image alone, of the working tree as it is.
func (r release) writeImage(ctx context.Context, name string) error {
	if err := r.readCommit(ctx); err != nil {
		return err
	}
	i := image{Name: name, Version: r.Version, Revision: r.revision, Created: r.time}
	for _, platform := range r.Platforms {
		manager, err := os.ReadFile(binaryPath(platform))
		if err != nil {
			return err
		}
		i.Managers = append(i.Managers, managerBinary{path.Base(platform), manager})
	}
	archive, digest, err := i.archive()
	if err != nil {
		return err
	}
	file := filepath.Join("bin", r.baseName()+"-image.oci.tar")
	if err := os.WriteFile(file, archive, 0o644); err != nil {
		return err
	}
	fmt.Fprintf(r.Log, "Wrote %s:%s to %s. Its digest is %s\n", name, r.Version, file, digest)
	return nil
}

// baseName is what the names of files begin with.
func (r release) baseName() string { return "quartermaster-" + strings.TrimPrefix(r.Version, "v") }

// check returns an error if the working tree has changes, or if the version belongs to another commit.
func (r release) check(ctx context.Context) error {
	changes, err := git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("the working tree has changes that are in no commit:\n%s", changes)
	}
	tag, err := git(ctx, "tag", "--list", r.Version)
	if err != nil {
		return err
	}
	headTag, err := git(ctx, "tag", "--points-at", "HEAD", "--list", r.Version)
	if err != nil {
		return err
	}
	if tag != headTag {
		return fmt.Errorf("the tag %s is on another commit than %s", r.Version, r.revision)
	}
	return nil
}

// readCommit reads the commit and its time.
func (r *release) readCommit(ctx context.Context) (err error) {
	if r.revision, err = git(ctx, "rev-parse", "HEAD"); err != nil {
		return err
	}
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	if epoch == "" {
		if epoch, err = git(ctx, "log", "-1", "--format=%ct"); err != nil {
			return err
		}
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH=%s: must be seconds since 1970", epoch)
	}
	r.time = time.Unix(seconds, 0).UTC()
	return nil
}

func git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(problems.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// build makes the binaries and the chart below bin/.
func (r release) build(ctx context.Context) error {
	args := []string{"--no-print-directory", "VERSION=" + r.Version, "chart"}
	for _, platform := range r.Platforms {
		args = append(args, binaryPath(platform))
	}
	cmd := exec.CommandContext(ctx, "make", args...)
	// Variables and options on make's command line must not change what is released.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKEFLAGS=") })
	cmd.Env = append(cmd.Env, fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.time.Unix()))
	cmd.Stdout, cmd.Stderr = r.Log, r.Log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("make %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func binaryPath(platform string) string { return "bin/" + platform + "/manager" }

// files returns the files of the release by name, and the image's digest.
func (r release) files(ctx context.Context) (map[string][]byte, string, error) {
	files := map[string][]byte{}
	baseName := r.baseName()
	chart, err := os.ReadFile(filepath.Join("bin", baseName+".tgz"))
	if err != nil {
		return nil, "", err
	}
	files[baseName+".tgz"] = chart
	license, err := os.ReadFile("LICENSE")
	if err != nil {
		return nil, "", err
	}
	image := image{Name: "quartermaster", Version: r.Version, Revision: r.revision, Created: r.time}
	for _, platform := range r.Platforms {
		manager, err := os.ReadFile(binaryPath(platform))
		if err != nil {
			return nil, "", err
		}
		bill, thirdParty, err := materials(ctx, manager, r.Version)
		if err != nil {
			return nil, "", err
		}
		goos, goarch, _ := strings.Cut(platform, "/")
		name := baseName + "-" + goos + "-" + goarch
		files[name+".cdx.json"] = bill
		licenses := []file{
			{Name: "LICENSE", Mode: 0o644, Content: license},
			{Name: "THIRD_PARTY_LICENSES.txt", Mode: 0o644, Content: thirdParty},
		}
		if goos == "windows" {
			files[name+".zip"], err = makeZip(r.time, append(licenses, file{Name: plugin + ".exe", Mode: 0o755, Content: manager}))
		} else {
			files[name+".tar.gz"], err = makeTarGz(r.time, append(licenses,
				file{Name: "manager", Mode: 0o755, Content: manager}, file{Name: plugin, Link: "manager"}))
		}
		if err != nil {
			return nil, "", err
		}
		if goos == "linux" {
			image.Managers = append(image.Managers, managerBinary{goarch, manager})
		}
	}
	archive, digest, err := image.archive()
	files[baseName+"-image.oci.tar"] = archive
	return files, digest, err
}

// plugin is the name by which kubectl finds the manager.
const plugin = "kubectl-quartermaster"

// writeFiles writes the files, and at last SHA256SUMS.
func writeFiles(dir string, files map[string][]byte) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var sums strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := os.WriteFile(filepath.Join(dir, name), files[name], 0o644); err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(files[name]), name)
	}
	return os.WriteFile(filepath.Join(dir, "SHA256SUMS"), []byte(sums.String()), 0o644)
}
