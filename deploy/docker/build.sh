#!/usr/bin/env bash
# Builds the router and CPU worker images without Docker, by Debian's buildah, on a base that debootstrap makes; then
# runs both until /ready and shows an answer and the sizes. Needs root, buildah and debootstrap.
#   MIRROR=…       a Debian mirror, where debootstrap's own default is not to be used
#   BUILD_ARGS=…   more for every `buildah build` and `buildah run`, such as volumes with a wheelhouse
#   ONLY=router    one image alone: router, worker-cpu or worker-cuda; SKIP_RUN=1 doesn't run them
# worker-cuda is built when it is named, and needs CUDA's compiler in the build: BUILD_ARGS="-v /usr/local/cuda:/usr/local/cuda:ro".
# Its last stage is then Debian instead of NVIDIA's base, and it is run on the CPU: that its steps, kernels and entrypoint
# are right, not that it serves on a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
base=localhost/baton-base:bookworm
only=${ONLY:-all}
read -r -a extra <<< "${BUILD_ARGS:-}"
build=(buildah --storage-driver vfs build --format docker --isolation chroot --network host "${extra[@]}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_base() {
  buildah --storage-driver vfs inspect --type image "$base" > /dev/null 2>&1 && return
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/root" ${MIRROR:-} > "$work/debootstrap.log"
  rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/usr/share/{doc,man,locale}/*
  tar -C "$work/root" -c . | gzip -1 > "$work/base.tar.gz"
  printf 'FROM scratch\nADD base.tar.gz /\nENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' > "$work/Containerfile"
  "${build[@]}" -q -t "$base" "$work" > /dev/null
}

image() {  # NAME DOCKERFILE ARGUMENTS...
  [ "$only" = all ] || [ "$only" = "$1" ] || return 0
  "${build[@]}" -q --build-arg BASE="$base" "${@:3}" -f "deploy/docker/$2" -t "localhost/baton-$1:$version" . > "$work/$1.id"
  size=$(buildah --storage-driver vfs images --format '{{.Size}}' "localhost/baton-$1:$version")
  echo "baton-$1:$version $size"
}

make_base
image router router.Dockerfile
image worker-cpu worker.Dockerfile
[ "$only" != worker-cuda ] || image worker-cuda worker-cuda.Dockerfile --build-arg BUILD_BASE="$base"
case "${SKIP_RUN:-}$only" in
  all) bash deploy/docker/try.sh "$version" worker-cpu ;;
  worker-cuda) bash deploy/docker/try.sh "$version" worker-cuda ;;  # with the router image that is there
esac
