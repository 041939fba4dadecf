/* Stub of libmana. It takes queue memory from external allocators, as manadv(7) describes. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <infiniband/manadv.h>
#include "stub.h"

static struct manadv_ctx_allocators allocators;
static void *page;
static int corruption, tables;

/* Corrupts answers. 1: rings longer than their memory. 2: no memory. 3: no doorbell page. */
void stub_corrupt_answers(int how) { corruption = how; }

struct cq { struct ibv_cq cq; void *buf; uint32_t count, id; };
struct qp { struct ibv_qp qp; void *buf; uint32_t count, size; };
struct wq { struct ibv_wq wq; void *buf; uint32_t count, size; };

static uint32_t ring(uint64_t bytes)
{
	uint32_t size = 4096;

	while (size < bytes)
		size *= 2;
	return size;
}
static void *allocate(uint32_t size)
{
	char *buf = allocators.alloc(size, allocators.data);

	for (uint32_t i = 0; buf && i < size; i++)
		if (buf[i])
			stub_violation("queue memory is not zero");
	if (buf)
		memset(buf, 0xa5, size);
	return buf;
}
static void release(void *buf) { allocators.free(buf, allocators.data); }

static struct ibv_cq *create_cq(struct ibv_context *c, int entries)
{
	struct cq *cq = calloc(1, sizeof(*cq));

	cq->count = entries;
	cq->id = UINT32_MAX;
	cq->buf = allocate(ring(entries * 64ull));
	return &cq->cq;
}
static void destroy_cq(struct ibv_cq *base)
{
	struct cq *cq = (struct cq *)base;

	release(cq->buf);
	free(cq);
}
static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct qp *qp;

	if (pd->handle != PARENT || !allocators.alloc) {
		errno = EINVAL;
		return NULL;
	}
	qp = calloc(1, sizeof(*qp));
	qp->count = attr->cap.max_send_wr;
	qp->size = ring(attr->cap.max_send_wr * (uint64_t)((16 * attr->cap.max_send_sge + 16 + 31) & ~31u));
	qp->buf = allocate(qp->size);
	((struct cq *)attr->send_cq)->id = 11;
	return &qp->qp;
}
static void destroy_qp(struct ibv_qp *base)
{
	struct qp *qp = (struct qp *)base;

	release(qp->buf);
	free(qp);
}
static struct ibv_pd *alloc_parent_domain(struct ibv_context *c, struct ibv_parent_domain_init_attr *attr)
{
	struct ibv_pd *pd;

	if (attr->comp_mask != IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT || attr->td) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (attr->pd_context != (void *)1 && attr->pd_context != (void *)2)
		stub_violation("port of the parent domain");
	pd = calloc(1, sizeof(*pd));
	pd->context = c;
	pd->handle = PARENT;
	stub_count(PARENT_DOMAIN, 1);
	return pd;
}
static struct ibv_wq *create_wq(struct ibv_context *c, struct ibv_wq_init_attr *attr)
{
	struct wq *wq = calloc(1, sizeof(*wq));

	memset(wq, 0xa5, sizeof(*wq)); /* the inline function must initialise the mutex */
	wq->wq.context = c;
	wq->wq.cq = attr->cq;
	wq->wq.cq->handle++;
	wq->count = attr->max_wr;
	wq->size = ring(attr->max_wr * (uint64_t)((16 * attr->max_sge + 16 + 31) & ~31u));
	wq->buf = allocate(wq->size);
	stub_count(WQ, 1);
	return &wq->wq;
}
static int destroy_wq(struct ibv_wq *base)
{
	struct wq *wq = (struct wq *)base;

	if (wq->wq.events_completed || pthread_mutex_trylock(&wq->wq.mutex))
		stub_violation("work queue was not initialised");
	if (tables)
		stub_violation("work queue destroyed before its table");
	wq->wq.cq->handle--;
	release(wq->buf);
	free(wq);
	stub_count(WQ, -1);
	return 0;
}
static struct ibv_rwq_ind_table *create_table(struct ibv_context *c, struct ibv_rwq_ind_table_init_attr *attr)
{
	struct ibv_rwq_ind_table *table = calloc(1, sizeof(*table));

	for (int i = 0; i < 1 << attr->log_ind_tbl_size; i++)
		if (attr->ind_tbl[i]->context != c)
			stub_violation("queue of an indirection table");
	table->context = c;
	tables++;
	stub_count(TABLE, 1);
	return table;
}
extern int stub_live(int kind);
static int destroy_table(struct ibv_rwq_ind_table *table)
{
	if (stub_live(RSS_QP))
		stub_violation("table destroyed before its queue pair");
	free(table);
	tables--;
	stub_count(TABLE, -1);
	return 0;
}
static struct ibv_qp *create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp *qp;

	if (stub_failure("create_qp_ex"))
		return NULL;
	if (attr->comp_mask != (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH) ||
	    attr->rx_hash_conf.rx_hash_key_len != 40 || attr->rx_hash_conf.rx_hash_key[39] != 40 ||
	    attr->rx_hash_conf.rx_hash_fields_mask != (IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4) ||
	    attr->pd->handle != PARENT)
		stub_violation("attributes of the RSS queue pair");
	qp = calloc(1, sizeof(*qp));
	qp->context = c;
	qp->qp_context = attr->qp_context;
	qp->qp_type = RSS;
	stub_count(RSS_QP, 1);
	return qp;
}

static void open_context(struct verbs_context *v)
{
	v->alloc_parent_domain = alloc_parent_domain;
	v->create_wq = create_wq;
	v->destroy_wq = destroy_wq;
	v->create_rwq_ind_table = create_table;
	v->destroy_rwq_ind_table = destroy_table;
	v->create_qp_ex = create_qp_ex;
	page = mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, v->context.cmd_fd, 0);
}
static void close_context(struct ibv_context *c)
{
	/* One context at a time has the doorbell page. A second context takes it over. */
	if (page)
		munmap(page, 4096);
	page = NULL;
}

int manadv_set_context_attr(struct ibv_context *c, enum manadv_set_ctx_attr_type type, void *attr)
{
	if (type != MANADV_CTX_ATTR_BUF_ALLOCATORS)
		return EOPNOTSUPP;
	allocators = *(struct manadv_ctx_allocators *)attr;
	return 0;
}
int manadv_init_obj(struct manadv_obj *obj, uint64_t type)
{
	if (type & MANADV_OBJ_QP) {
		struct qp *qp = (struct qp *)obj->qp.in;

		obj->qp.out->sq_buf = corruption == 2 ? NULL : qp->buf;
		obj->qp.out->sq_count = qp->count;
		obj->qp.out->sq_size = corruption == 1 ? qp->size * 2 : qp->size;
		obj->qp.out->sq_id = 21;
		obj->qp.out->tx_vp_offset = 5;
		obj->qp.out->db_page = corruption == 3 ? NULL : page;
	}
	if (type & MANADV_OBJ_CQ) {
		struct cq *cq = (struct cq *)obj->cq.in;

		obj->cq.out->buf = cq->buf;
		obj->cq.out->count = corruption == 1 ? cq->count * 1000 : cq->count;
		obj->cq.out->cq_id = cq->id;
	}
	if (type & MANADV_OBJ_RWQ) {
		struct wq *wq = (struct wq *)obj->rwq.in;

		obj->rwq.out->buf = wq->buf;
		obj->rwq.out->count = wq->count;
		obj->rwq.out->size = corruption == 1 ? wq->size * 2 : wq->size;
		obj->rwq.out->wq_id = 31;
		obj->rwq.out->db_page = page;
	}
	return 0;
}

__attribute__((constructor)) static void register_provider(void)
{
	static const struct stub_provider provider = {
		open_context, close_context, create_cq, destroy_cq, create_qp, destroy_qp
	};

	stub_register(&provider);
}
