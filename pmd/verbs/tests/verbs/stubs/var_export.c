/* Stub of libmlx5 of rdma-core 63 and later, for machines with an older release. It depends on the installed libmlx5
 * and passes its functions on. It adds the export and import of VARs with their semantics: no kernel call, no check,
 * and only the owner frees the VAR. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <infiniband/mlx5dv.h>

/* A VAR of the older library (rdma-core: providers/mlx5/mlx5.h, struct mlx5_var_obj). */
struct var { struct mlx5dv_var dv; struct ibv_context *context; uint32_t handle; };
struct attributes { uint32_t handle, page_id, length; off_t mmap_off; };
struct sizes { uint32_t var, umem, obj; };

void _mlx5dv_get_export_sizes(struct sizes *sizes, size_t bytes)
{
	struct sizes known = { sizeof(struct attributes), 16, 16 };

	memcpy(sizes, &known, bytes < sizeof(known) ? bytes : sizeof(known));
}
int mlx5dv_var_export(struct mlx5dv_var *dv, void *data)
{
	struct var *var = (struct var *)dv;
	struct attributes *out = data;

	memset(out, 0, sizeof(*out));
	out->handle = var->handle;
	out->page_id = dv->page_id;
	out->length = dv->length;
	out->mmap_off = dv->mmap_off;
	return 0;
}
struct mlx5dv_var *mlx5dv_var_import(struct ibv_context *context, void *data)
{
	struct attributes *in = data;
	struct var *var = calloc(1, sizeof(*var));

	if (!var) {
		errno = ENOMEM;
		return NULL;
	}
	var->context = context;
	var->handle = in->handle;
	var->dv.page_id = in->page_id;
	var->dv.length = in->length;
	var->dv.mmap_off = in->mmap_off;
	return &var->dv;
}
void mlx5dv_var_unimport(struct mlx5dv_var *dv) { free(dv); }
