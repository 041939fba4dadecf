/* Stub of libhbl with the rules of the kernel driver for a Gaudi 2 (HabanaAI/drivers.gpu.linux-nic.kernel: hbl_encap.c,
 * hbl_cn.c, gaudi2_cn.c). Its header is not packaged, so the structures of the proposed provider are repeated here. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"

#define PORTS 4u
#define CAP_ENCAP 0x10u

struct ucontext_attr { uint64_t ports_mask; int core_fd; };
struct encap_attr {
	uint64_t tnl_hdr_ptr;
	uint32_t tnl_hdr_size, ipv4_addr, port_num;
	uint16_t detail;
	uint32_t encap_type;
};
struct encap { uint32_t encap_num; uint32_t port; unsigned char header[32]; struct encap *next; };
struct qp_attr {
	uint64_t caps;
	uint32_t local_key, remote_key, congestion_wnd, reserved0, dest_wq_size, wq_type, wq_granularity;
	uint8_t priority, reserved1, reserved2, encap_num, reserved3;
};
struct port_ex_attr {
	struct { uint32_t max_wqs, max_wqes, mem_id, granularity; } wq[5];
	uint64_t caps;
	uint32_t bp_offs[16], reserved0[2], port_num;
	uint8_t reserved1;
};
struct query_port_attr { uint32_t words[9]; uint8_t bytes[6]; };
struct cq_attr { uint8_t port_num; uint32_t cq_type; };
struct qp { struct ibv_qp qp; int port, responder, requester; };

static uint64_t ports;
static int opened, set_up[PORTS + 1], any_size, odd_id;
static struct encap *encaps;
static struct encap_attr last;
static unsigned char last_header[32];

/* Accepts every kind and size that the generic code of the kernel driver supports. */
void stub_any_size(int yes) { any_size = yes; }
/* Sets the ID of the next encapsulation. */
void stub_odd_id(int id) { odd_id = id; }
const struct encap_attr *stub_last_encap(void) { return &last; }
const unsigned char *stub_last_header(void) { return last_header; }

static int valid(uint32_t port) { return port >= 1 && port <= PORTS && ports >> port & 1; }
static struct encap *find(uint32_t port, uint32_t id)
{
	struct encap *e;

	for (e = encaps; e && (e->port != port || e->encap_num != id); e = e->next)
		;
	return e;
}

/* An operation of this library. It identifies the provider of the context. */
static int poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc) { return 0; }
static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return calloc(1, sizeof(struct qp));
}
static void destroy_qp(struct ibv_qp *qp) { free(qp); }
static void open_context(struct verbs_context *v) { v->context.ops.poll_cq = poll_cq; }
static void close_context(struct ibv_context *c)
{
	opened = 0;
	memset(set_up, 0, sizeof(set_up));
}

_Bool hbldv_is_supported(struct ibv_device *d) { return strncmp(d->name, "hbl", 3) == 0; }
struct ibv_context *hbldv_open_device(struct ibv_device *d, struct ucontext_attr *attr)
{
	if (!hbldv_is_supported(d))
		errno = EOPNOTSUPP;
	else if (attr->core_fd < 0)
		errno = EBADF;
	else if (opened)
		errno = EBUSY; /* a device has one user */
	else if (attr->ports_mask & ~(((1ull << PORTS) - 1) << 1))
		errno = EINVAL;
	else {
		struct ibv_context *c = ibv_open_device(d);

		if (c) {
			opened = 1;
			ports = attr->ports_mask ? attr->ports_mask : ((1ull << PORTS) - 1) << 1;
		}
		return c;
	}
	return NULL;
}
int hbldv_query_device(struct ibv_context *c, uint64_t attr[2])
{
	attr[0] = 1;
	attr[1] = ports;
	return 0;
}
int hbldv_set_port_ex(struct ibv_context *c, struct port_ex_attr *attr)
{
	if (!valid(attr->port_num))
		return EINVAL;
	if (attr->wq[0].mem_id != 1 && attr->wq[0].mem_id != 2)
		return EINVAL;
	set_up[attr->port_num] = 1;
	return 0;
}
int hbldv_query_port(struct ibv_context *c, uint32_t port, struct query_port_attr *attr)
{
	if (!valid(port))
		return EINVAL;
	if (!set_up[port])
		return EPERM;
	attr->words[0] = 1024;
	attr->words[3] = 65536;
	attr->bytes[1] = 4;
	attr->bytes[3] = 1;
	return 0;
}
struct encap *hbldv_create_encap(struct ibv_context *c, struct encap_attr *attr)
{
	/* The NIC counts ports from 0. Encapsulations of even ports have ID 0, those of odd ports have ID 2. */
	uint32_t id = (attr->port_num - 1) & 1 ? 2 : 0;
	struct encap *e;

	errno = 0;
	if (stub_failure("hbldv_create_encap"))
		return NULL;
	if (!valid(attr->port_num))
		errno = EINVAL;
	else if (!set_up[attr->port_num])
		errno = EPERM;
	else if (find(attr->port_num, id))
		errno = EBUSY;
	else if (!any_size && (attr->encap_type != 2 || attr->tnl_hdr_size != 32))
		errno = EOPNOTSUPP;
	else if (attr->tnl_hdr_size > 32 || attr->tnl_hdr_size % 4)
		errno = EINVAL;
	else if (!attr->tnl_hdr_ptr)
		errno = EFAULT;
	if (errno)
		return NULL;
	e = calloc(1, sizeof(*e));
	e->encap_num = odd_id ? odd_id : id;
	odd_id = 0;
	e->port = attr->port_num;
	memcpy(last_header, (void *)(uintptr_t)attr->tnl_hdr_ptr, attr->tnl_hdr_size);
	last = *attr;
	e->next = encaps;
	encaps = e;
	stub_count(ENCAP, 1);
	return e;
}
extern int stub_live(int kind);
int hbldv_destroy_encap(struct encap *e)
{
	struct encap **at = &encaps;
	int refused = stub_failure("hbldv_destroy_encap");

	while (*at != e)
		at = &(*at)->next;
	*at = e->next;
	if (stub_live(QP))
		stub_violation("encapsulation destroyed before its queue pairs");
	free(e); /* even if the kernel call fails */
	stub_count(ENCAP, -1);
	return refused;
}
struct ibv_cq *hbldv_create_cq(struct ibv_context *c, int cqe, struct ibv_comp_channel *channel, int vector,
			       struct cq_attr *attr)
{
	if (!valid(attr->port_num) || !set_up[attr->port_num]) {
		errno = EPERM;
		return NULL;
	}
	return ibv_create_cq(c, cqe, NULL, channel, vector);
}
int hbldv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct qp_attr *hbl)
{
	struct qp *qp = (struct qp *)base;
	int encap = -1;

	if (hbl->caps & CAP_ENCAP)
		encap = hbl->encap_num;
	else if (hbl->encap_num)
		return EINVAL;
	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		if (!(mask & IBV_QP_PORT) || !valid(attr->port_num) || !set_up[attr->port_num] || hbl->wq_type == 0)
			return EINVAL;
		qp->port = attr->port_num;
		base->qp_num = 0x100 + qp->port;
		break;
	case IBV_QPS_RTR:
		if (base->state != IBV_QPS_INIT || !(mask & IBV_QP_AV) || hbl->priority < 1 || hbl->priority > 3)
			return EINVAL;
		qp->responder = encap;
		break;
	case IBV_QPS_RTS:
		if (base->state != IBV_QPS_RTR || hbl->priority < 1 || hbl->priority > 3)
			return EINVAL;
		qp->requester = encap;
		/* The kernel does not check the following. */
		if (qp->responder != qp->requester)
			stub_violation("one direction of a queue pair is encapsulated, the other is not");
		if (encap >= 0 && !find(qp->port, encap))
			stub_violation("a queue pair uses an encapsulation that is not of its port");
		break;
	default:
		return EINVAL;
	}
	base->state = attr->qp_state;
	return 0;
}

__attribute__((constructor)) static void register_provider(void)
{
	static const struct stub_provider provider = {
		open_context, close_context, NULL, NULL, create_qp, destroy_qp, IBV_QPT_RC
	};

	if (getenv("STUB_DEVICE"))
		stub_register(&provider);
}
