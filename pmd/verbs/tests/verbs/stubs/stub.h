#include <endian.h>
#include <stddef.h>
#include <infiniband/verbs.h>

enum { LIST, CONTEXT, DOMAIN, PARENT_DOMAIN, MR, CHANNEL, CQ, QP, WQ, TABLE, RSS_QP, ENCAP, KINDS };
/* Markers in fields that are otherwise unused. */
enum { PARENT = 0xdad, RSS = 0xff };

struct stub_provider {
	void (*open)(struct verbs_context *);
	void (*close)(struct ibv_context *);
	struct ibv_cq *(*create_cq)(struct ibv_context *, int);
	void (*destroy_cq)(struct ibv_cq *);
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	void (*destroy_qp)(struct ibv_qp *);
	/* Type of queue pairs; 0 for raw-packet pairs. */
	enum ibv_qp_type type;
};

void stub_register(const struct stub_provider *);
void stub_violation(const char *);
void stub_count(int kind, int by);
int stub_failure(const char *);
