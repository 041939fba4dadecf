/* Stub of libibverbs, compiled by the tests with the real headers. It counts objects, reports the destruction of
 * objects that are in use (where the real library would block or crash), and fails calls and raises events on request.
 * It uses no device and no kernel interface. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "stub.h"

#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device device;
static struct stub_provider provider;
static int event_socket = -1;
static char violations[4096];
static char fail_call[64];
static int fail_errno;
static int live[KINDS];
static struct ibv_qp *last_qp;
static struct ibv_cq *last_cq;
static int delivered, acknowledged;

void stub_register(const struct stub_provider *p) { provider = *p; }

/* Records a violation of the rules of the library. */
void stub_violation(const char *what)
{
	strncat(violations, what, sizeof(violations) - strlen(violations) - 2);
	strcat(violations, "\n");
}
const char *stub_violations(void) { return violations; }
int stub_live(int kind) { return live[kind]; }
void stub_count(int kind, int by) { live[kind] += by; }

void stub_fail(const char *call, int error)
{
	snprintf(fail_call, sizeof(fail_call), "%s", call);
	fail_errno = error;
}
/* Returns the errno with which this call must fail now, or 0. */
int stub_failure(const char *call)
{
	if (strcmp(call, fail_call) != 0)
		return 0;
	fail_call[0] = 0;
	errno = fail_errno;
	return fail_errno;
}

struct ibv_device **ibv_get_device_list(int *number)
{
	struct ibv_device **list;

	if (stub_failure("ibv_get_device_list"))
		return NULL;
	list = calloc(2, sizeof(*list));
	list[0] = &device;
	device.node_type = IBV_NODE_RNIC;
	strcpy(device.name, getenv("STUB_DEVICE") ? getenv("STUB_DEVICE") : "mana_0");
	strcpy(device.dev_name, "uverbs0");
	snprintf(device.ibdev_path, sizeof(device.ibdev_path), "%s",
		 getenv("STUB_SYSFS") ? getenv("STUB_SYSFS") : "/nonexistent");
	*number = 1;
	live[LIST]++;
	return list;
}
void ibv_free_device_list(struct ibv_device **list)
{
	if (live[CONTEXT])
		stub_violation("device list freed before the context was closed");
	live[LIST]--;
	free(list);
}

static int query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *in,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	if (stub_failure("query_device_ex"))
		return fail_errno;
	if (size != sizeof(*attr))
		stub_violation("query_device_ex: size");
	memset(attr, 0, size);
	strcpy(attr->orig_attr.fw_ver, "1.2.3");
	attr->orig_attr.phys_port_cnt = 2;
	attr->orig_attr.max_qp_wr = 8192;
	attr->rss_caps.supported_qpts = 1 << IBV_QPT_RAW_PACKET;
	attr->rss_caps.max_rwq_indirection_table_size = 64;
	attr->raw_packet_caps = IBV_RAW_PACKET_CAP_IP_CSUM;
	return 0;
}
int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	strcpy(attr->fw_ver, "old");
	return 0;
}
static int query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	if (port < 1 || port > 2)
		return EINVAL;
	attr->state = IBV_PORT_ACTIVE;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	attr->active_width = 2;
	attr->active_speed = 32;
	return 0;
}
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *attr) { return EINVAL; }

static int poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc)
{
	return EOPNOTSUPP; /* like the default operation of the real library */
}
static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct verbs_context *v;
	int pair[2];

	if (stub_failure("ibv_open_device"))
		return NULL;
	v = calloc(1, sizeof(*v));
	v->sz = sizeof(*v);
	v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	v->context.device = d;
	v->context.num_comp_vectors = 4;
	v->context.cmd_fd = memfd_create("stub", MFD_ALLOW_SEALING);
	if (ftruncate(v->context.cmd_fd, 4096) || fcntl(v->context.cmd_fd, F_ADD_SEALS, F_SEAL_SHRINK))
		abort();
	socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
	v->context.async_fd = pair[0];
	event_socket = pair[1];
	v->context.ops.poll_cq = poll_cq;
	v->context.ops.req_notify_cq = req_notify_cq;
	v->query_device_ex = query_device_ex;
	v->query_port = query_port;
	if (provider.open)
		provider.open(v);
	live[CONTEXT]++;
	return &v->context;
}
int ibv_close_device(struct ibv_context *c)
{
	for (int kind = DOMAIN; kind < KINDS; kind++)
		if (live[kind] && !getenv("STUB_LEAKS"))
			stub_violation("context closed before its objects");
	live[CONTEXT]--;
	close(c->cmd_fd);
	close(c->async_fd);
	close(event_socket);
	if (provider.close)
		provider.close(c);
	free((char *)c - offsetof(struct verbs_context, context));
	return 0;
}

struct event { uint32_t type; int32_t port; };

/* Events of queues are for the queue that was created last. */
void stub_raise(uint32_t type, int port)
{
	struct event e = { type, port };

	if (send(event_socket, &e, sizeof(e), 0) != sizeof(e))
		abort();
}
int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *event)
{
	struct event e;

	if (read(c->async_fd, &e, sizeof(e)) != sizeof(e))
		return -1;
	event->event_type = e.type;
	if (e.type == IBV_EVENT_QP_FATAL)
		event->element.qp = last_qp;
	else if (e.type == IBV_EVENT_CQ_ERR)
		event->element.cq = last_cq;
	else
		event->element.port_num = e.port;
	delivered++;
	return 0;
}
void ibv_ack_async_event(struct ibv_async_event *event) { acknowledged++; }

/* The real library would block here until all events are acknowledged. */
static void check_acknowledged(void)
{
	if (delivered != acknowledged)
		stub_violation("destroyed with an event that was not acknowledged");
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
	struct ibv_pd *pd;

	if (stub_failure("ibv_alloc_pd"))
		return NULL;
	pd = calloc(1, sizeof(*pd));
	pd->context = c;
	live[DOMAIN]++;
	return pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (pd->handle == PARENT) {
		if (live[QP] || live[WQ])
			stub_violation("parent domain freed before its queues");
		live[PARENT_DOMAIN]--;
	} else {
		if (live[MR] || live[PARENT_DOMAIN])
			stub_violation("domain freed before what is in it");
		live[DOMAIN]--;
	}
	free(pd);
	return 0;
}
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	struct ibv_mr *mr;

	if (stub_failure("ibv_reg_mr"))
		return NULL;
	/* This reads every page, because the memory must be mapped. */
	for (size_t i = 0; i < length; i += 4096)
		((volatile char *)address)[i];
	mr = calloc(1, sizeof(*mr));
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = address;
	mr->length = length;
	mr->lkey = 0x1000 | access;
	live[MR]++;
	return mr;
}
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
	if (iova != (uintptr_t)address)
		stub_violation("iova");
	return ibv_reg_mr(pd, address, length, (int)access);
}
int ibv_dereg_mr(struct ibv_mr *mr)
{
	if (stub_failure("ibv_dereg_mr"))
		return fail_errno;
	live[MR]--;
	free(mr);
	return 0;
}
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));
	int pair[2];

	socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
	channel->context = c;
	channel->fd = pair[0];
	channel->refcnt = pair[1]; /* other end of the socket pair; the real field counts queues */
	live[CHANNEL]++;
	return channel;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	if (live[CQ])
		stub_violation("channel destroyed before its queues");
	close(channel->fd);
	close(channel->refcnt);
	live[CHANNEL]--;
	free(channel);
	return 0;
}
void stub_complete(void)
{
	if (send(last_cq->channel->refcnt, &last_cq, sizeof(last_cq), 0) != sizeof(last_cq))
		abort();
}
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
	if (read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq))
		return -1;
	*context = (*cq)->cq_context;
	(*cq)->comp_events_completed++;
	return 0;
}
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int number) { cq->comp_events_completed -= number; }

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int entries, void *context, struct ibv_comp_channel *channel,
			     int vector)
{
	struct ibv_cq *cq;

	if (stub_failure("ibv_create_cq"))
		return NULL;
	cq = provider.create_cq ? provider.create_cq(c, entries) : calloc(1, sizeof(*cq));
	if (!cq)
		return NULL;
	cq->context = c;
	cq->cq_context = context;
	cq->channel = channel;
	cq->cqe = entries;
	last_cq = cq;
	live[CQ]++;
	return cq;
}
int ibv_destroy_cq(struct ibv_cq *cq)
{
	if (stub_failure("ibv_destroy_cq"))
		return fail_errno;
	check_acknowledged();
	if (cq->comp_events_completed)
		stub_violation("completion queue destroyed with an event that was not acknowledged");
	if (cq->handle) /* number of queues that complete here */
		stub_violation("completion queue destroyed before its queues");
	live[CQ]--;
	if (provider.destroy_cq)
		provider.destroy_cq(cq);
	else
		free(cq);
	return 0;
}
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp;

	if (stub_failure("ibv_create_qp"))
		return NULL;
	if (attr->qp_type != (provider.type ? provider.type : IBV_QPT_RAW_PACKET))
		stub_violation("type of queue pair");
	qp = provider.create_qp ? provider.create_qp(pd, attr) : calloc(1, sizeof(*qp));
	if (!qp)
		return NULL;
	qp->context = pd->context;
	qp->pd = pd;
	qp->qp_context = attr->qp_context;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->send_cq->handle++;
	qp->recv_cq->handle++;
	qp->qp_num = 0x77;
	last_qp = qp;
	live[QP]++;
	return qp;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (attr->qp_state == IBV_QPS_INIT && (mask != (IBV_QP_STATE | IBV_QP_PORT) || attr->port_num == 0))
		stub_violation("a queue pair is initialised with its port");
	if (attr->qp_state == IBV_QPS_RTS && qp->state != IBV_QPS_RTR)
		return EINVAL;
	qp->state = attr->qp_state;
	return 0;
}
int ibv_destroy_qp(struct ibv_qp *qp)
{
	if (stub_failure("ibv_destroy_qp"))
		return fail_errno;
	check_acknowledged();
	if (qp->qp_type == RSS) {
		live[RSS_QP]--;
	} else {
		qp->send_cq->handle--;
		qp->recv_cq->handle--;
		live[QP]--;
	}
	if (provider.destroy_qp && qp->qp_type != RSS)
		provider.destroy_qp(qp);
	else
		free(qp);
	return 0;
}
