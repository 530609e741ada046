"""RetinaNet: objects in images, each with a box, a class and a score."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["RetinaNetConfig"],
        ".model": ["RetinaNet"],
        ".boxes": ["encode", "decode", "iou", "clip_boxes", "match", "nms"],
        ".objective": ["Batch", "loss", "detections", "objects", "focal_loss"],
        ".images": ["detect"],
        ".coco": ["evaluate"],
        ".scoring": ["Scoring"],
        ".parallel": ["parallelize"],
        ".load": ["load_backbone", "load_weights"],
    },
)
