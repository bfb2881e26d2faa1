"""/clusters: groups of images, objects and faces that are alike."""

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated

from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, PathParameter, QueryParameter

from app.api.dependencies import Worker
from app.api.search.asking import CHANGES, READING, AnyRequest, Document, PageNumber, PageSize, ask, pick
from app.api.search.persons import alone_in_search
from app.errors import NotOffered, UnknownRecord
from app.search.clusters import MAX_CLUSTERS, MAX_SAMPLES, find_centroids
from app.search.engine import Page, VectorIndex

_Number = Annotated[int | None, QueryParameter(ge=1, le=MAX_CLUSTERS, description="Default: the root of the number of samples.")]
_Samples = Annotated[
    int, QueryParameter(ge=100, le=MAX_SAMPLES, description="Vectors, taken at random, that clusters are found in.")
]
_ClusterId = Annotated[int, PathParameter(ge=0, lt=MAX_CLUSTERS)]
_MEMBER = {"image_id": "image_id", "image_path": "path", "score": "part_score", "class_id": "class_id", "box": "box"}


@post("/clusters/train/{index:str}", summary="Find the clusters of an index", **CHANGES)
async def train_clusters(
    request: AnyRequest, worker: Worker, index: FromPath[VectorIndex], n_clusters: _Number = None, max_samples: _Samples = 20_000
) -> Document:
    """Replace the clusters of an index by ones that k-means finds in `n_vectors`, and assign all vectors: `documents_updated`."""
    began = perf_counter()
    with alone_in_search(request, worker) as (engine, tenant):
        vectors = await engine.sample(tenant, index, max_samples)
        if not len(vectors):
            raise UnknownRecord(f"the index {index} is empty")
        centroids = await asyncio.to_thread(find_centroids, vectors, n_clusters or round(len(vectors) ** 0.5))
        count = await engine.save_clusters(tenant, index, centroids)
        sizes = _describe_sizes(await engine.clusters(tenant, index))
    counts = {**sizes, "n_vectors": len(vectors), "documents_updated": count, "training_time_s": round(perf_counter() - began, 3)}
    return {"status": "success", "index_name": index, **counts}


def _describe_sizes(sizes: Sequence[int]) -> Document:
    average = round(sum(sizes) / max(1, len(sizes)), 2)
    return {"n_clusters": len(sizes), "avg_cluster_size": average, "empty_clusters": sizes.count(0)}


@post("/clusters/assign/{index:str}", summary="Assign what was indexed after the training", **CHANGES)
async def assign_clusters(request: AnyRequest, worker: Worker, index: FromPath[VectorIndex]) -> Document:
    """Assign each vector that has no cluster to the nearest one."""
    with alone_in_search(request, worker) as (engine, tenant):
        count = await engine.assign_clusters(tenant, index)
    return {"status": "success", "index_name": index, "documents_found": count, "documents_updated": count}


@post("/clusters/rebalance/{index:str}", summary="Not offered: train again", **CHANGES)
async def rebalance_clusters(index: FromPath[VectorIndex]) -> None:
    """Say how clusters are found anew."""
    raise NotOffered(f"clusters are not rebalanced; POST /clusters/train/{index} finds them anew")


@get("/clusters/albums", summary="Not offered: clusters are no albums", responses=READING)
async def albums() -> None:
    """Say what lists clusters."""
    raise NotOffered("there are no albums; GET /clusters/stats/global lists clusters, GET /clusters/global/ID the images in one")


@get("/clusters/stats/{index:str}", summary="List the clusters of an index", responses=READING)
async def cluster_statistics(request: AnyRequest, worker: Worker, index: FromPath[VectorIndex]) -> Document:
    """List the clusters of an index, largest first; none if it was not trained.

    They are in `opensearch_clusters`, and their sizes are described in `faiss`, as clients of another gateway expect.
    """
    sizes = await ask(request, worker, lambda engine, tenant: engine.clusters(tenant, index))
    extremes = {"min_cluster_size": min(sizes, default=0), "max_cluster_size": max(sizes, default=0)}
    summary = {"is_trained": bool(sizes), "n_vectors": sum(sizes), **extremes, **_describe_sizes(sizes)}
    filled = [{"cluster_id": at, "count": sizes[at]} for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]) if sizes[at]]
    listed = {"opensearch_clusters": filled, "total_clusters_in_opensearch": len(filled)}
    return {"status": "success", "index_name": index, "faiss": summary, **listed}


@get("/clusters/{index:str}/{cluster_id:int}", summary="List what is in a cluster", responses=READING)
async def cluster_members(  # noqa: PLR0913, PLR0917 - parts of a request
    request: AnyRequest,
    worker: Worker,
    index: FromPath[VectorIndex],
    cluster_id: _ClusterId,
    page: PageNumber = 0,
    size: PageSize = 50,
) -> Document:
    """List what is in a cluster, nearest to its centre first: `cluster_distance` is 1 less the cosine to that.

    `score`, `class_id` and `box` are those of an object or a face, `box` as fractions of the upright image.
    """
    found = await ask(request, worker, lambda engine, tenant: engine.cluster(tenant, index, cluster_id, Page(size, page * size)))
    members = [pick(hit, _MEMBER) | {"cluster_distance": round(1 - hit.score, 6)} for hit in found.items]
    paging = {"cluster_id": cluster_id, "page": page, "size": size, "count": len(members), "total": found.total}
    return {"status": "success", "index_name": index, **paging, "members": members}


ROUTES: list[HTTPRouteHandler] = [
    *(train_clusters, assign_clusters, rebalance_clusters, albums, cluster_statistics, cluster_members)
]
